"""What still changes from one decode step to the next, of all that a CUDA graph would have to hold still (§5.2).

A graph replays the same kernels with the same grids and scalar arguments; only what pointers point to may change. Here
an engine decodes a fixed number of requests on the CPU, and beside each operator that computes the step the Triton
launches that a GPU would make for it are recorded, not run, with the rows of every matrix product. Steps are compared
within one set of layouts, where only contexts grow, and between sets of layouts, with the context cache (which keeps
gate rows of generated tokens) and without. What else a graph would not hold is counted per step: memory taken, copies
of the host's numbers, and results that the host waits for. No GPU is needed.

The same steps are taken with `EngineConfig(static_decode=True)`, whose promise is that nothing changes within a bucket:
there also the addresses that each launch is given are compared, over all sets of layouts and numbers of requests. Not
counted is what the sampler makes of the logits, behind the step.

    python bench/decode_launches.py [--quick] [--json]
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from common import Report, arguments
from layouts import draw_layouts
from torch.utils._python_dispatch import TorchDispatchMode

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.kernels import cpu, triton_backend
from flexops.kernels.linear import PackedLinear
from flexops.runtime import Engine, SamplingParams, batch, executor
from flexops.runtime.branches import BranchCoordinator
from flexops.runtime.coordination import CostModel, DeviceSpeed
from flexops.runtime.sampler import Sampler
from flexops.runtime.static_decode import IndexBuffer, StaticDecode


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, by name what is fixed in it besides pointers ("grid" is a name too), and the pointers."""

    kernel: str
    fixed: tuple[tuple[str, object], ...]
    addresses: tuple[int, ...] = ()


@dataclass
class Step:
    """What one decode step did: its launches, and what the host did besides (`Host.counts`).

    bucket: of a static step, rows, columns of its page tables and tokens that the table of gate rows has room for.
    """

    launches: list[Launch]
    host: Counter[str]
    bucket: tuple[int, int, int] | None = None


class Host(TorchDispatchMode):
    """Counts, in `counts`, what the host does between launches, while not `paused`.

    "memory": tensors with memory of their own, what Triton's operators allocate for results included.  "copies": arrays
    of the host that go to the device.  "waits": numbers of the device that the host reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            made = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)]
            self.counts["memory"] += sum(t.untyped_storage().data_ptr() not in given and t.numel() > 0 for t in made)
            self.counts["waits"] += func is torch.ops.aten._local_scalar_dense.default
        return out


@contextmanager
def recording(engine: Engine) -> Iterator[Step]:
    """What the step inside does, filled in on the way. The CPU's operators compute it."""
    from triton.runtime.jit import JITFunction

    host = Host()
    step = Step([], host.counts)
    run, linear, operators = JITFunction.run, PackedLinear.__call__, engine.executor.ops
    engine.executor.records = False  # a replay would launch nothing of Triton's
    send, sample, send_index, run_static = batch.on_device, Sampler.sample, IndexBuffer.send, StaticDecode.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = self.signature.bind(*args, **{k: v for k, v in named.items() if not k.startswith("num_")})
        values = bound.arguments.items()
        fixed = tuple((k, v is None if v is None else v) for k, v in values if not isinstance(v, torch.Tensor))
        addresses = tuple(v.data_ptr() for _, v in values if isinstance(v, torch.Tensor))
        name = self.fn.__name__.strip("_").removesuffix("_kernel")
        step.launches.append(Launch(name, (("grid", grid[0]), *fixed), addresses))

    def record_linear(self: PackedLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        host.counts["memory"] += out is None
        y = unseen(linear, self, x, out)
        name = f"linear {self.in_features} -> {self.out_features}"
        step.launches.append(Launch(name, (("rows", x.shape[0]),), (x.data_ptr(), y.data_ptr())))
        return y

    def unseen(call: Callable[..., Any], *args: Any) -> Any:
        """What only the CPU does, or what is counted otherwise."""
        host.paused, before = True, host.paused
        try:
            return call(*args)
        finally:
            host.paused = before

    def record_send(*args: Any) -> torch.Tensor:
        host.counts["copies"] += 1
        host.counts["memory"] += 1
        return unseen(send, *args)

    def record_index(self: IndexBuffer) -> None:
        host.counts["copies"] += 1
        send_index(self)

    def record_static(self: StaticDecode, ops: Any, gate_table: torch.Tensor | None) -> torch.Tensor:
        step.bucket = self.size, self.columns, 0 if gate_table is None else gate_table.shape[1]
        return run_static(self, ops, gate_table)

    def record_sample(*args: Any) -> Any:
        host.counts["waits"] += 1  # tokens: a step ends with them
        return unseen(sample, *args)

    def both(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            getattr(triton_backend, name)(*args)  # only recorded, so it writes nothing
            return unseen(getattr(cpu, name), *args)

        return call

    JITFunction.run, PackedLinear.__call__ = record, record_linear
    engine.executor.ops = SimpleNamespace(**{name: both(name) for name in OPERATORS}, **WORKSPACE)
    batch.on_device = executor.on_device = record_send
    Sampler.sample, IndexBuffer.send, StaticDecode.run = record_sample, record_index, record_static
    try:
        with host:
            yield step
    finally:
        JITFunction.run, PackedLinear.__call__, engine.executor.ops = run, linear, operators
        batch.on_device = executor.on_device = send
        Sampler.sample, IndexBuffer.send, StaticDecode.run = sample, send_index, run_static


# a GPU's attention works in memory that the CPU's has no use for: it is to be counted
WORKSPACE = {"attention_workspace": triton_backend.attention_workspace}
OPERATORS = [name for name in cpu.__all__ if name not in WORKSPACE]


def make_engine(context_cache: str | None = None, static_decode: bool = False) -> Engine:
    """A small adaptive model whose decodes take the fused launch where both branches have some."""
    torch.manual_seed(0)
    config = FlexHybridConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        max_position_embeddings=2048,
    )
    settings = EngineConfig(context_cache=context_cache, memory_bytes=1 << 26, static_decode=static_decode)
    engine = Engine(FlexHybridModel(config).eval(), settings)
    cost = CostModel(config, torch.float32, DeviceSpeed(1.0, 1.0))
    # a fork that costs for ever: prompts run one branch after the other, and decodes take the fused launch
    engine.executor.coordinator = BranchCoordinator(cost, True, [], [], num_sms=132, fork_join_us=float("inf"))
    engine.executor.ops = SimpleNamespace(**{name: getattr(cpu, name) for name in OPERATORS}, **WORKSPACE)
    if engine.executor.static is not None:
        engine.executor.static.fused = True
    return engine


def decode_steps(engine: Engine, size: int, seed: int, steps: int, prompt_tokens: int) -> list[Step]:
    """The steps of `size` requests with layouts drawn by this seed, each of which decodes `steps` tokens.

    With a context cache the gates choose the layouts: then their rows are kept.
    """
    for i, layout in enumerate(draw_layouts(engine.model_config.num_hidden_layers, size, seed=seed)):
        prompt = [(7 * i + j + seed) % 250 for j in range(prompt_tokens)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=steps + 1), None if engine.cache else layout)
    while engine.scheduler.waiting or any(not r.output for r in engine.scheduler.running):
        engine.step()
    found = []
    while engine.has_unfinished():
        with recording(engine) as step:
            engine.step()
        found.append(step)
    return found


def changes(steps: list[list[Launch]], addresses: bool = False) -> dict[str, set[str]]:
    """By kernel, what differs between its launches in these steps, one by one; "number" where it has more or fewer.

    addresses: what pointers hold may not differ either.
    """

    def by_kernel(step: list[Launch]) -> dict[str, list[Launch]]:
        found = defaultdict(list)
        for launch in step:
            found[launch.kernel].append(launch)
        return found

    changed: dict[str, set[str]] = defaultdict(set)
    first = by_kernel(steps[0])
    for step in map(by_kernel, steps[1:]):
        for kernel in first.keys() | step.keys():
            ours, theirs = first.get(kernel, []), step.get(kernel, [])
            if len(ours) != len(theirs):
                changed[kernel].add("number")
            for a, b in zip(ours, theirs, strict=False):
                changed[kernel] |= {name for (name, x), (_, y) in zip(a.fixed, b.fixed, strict=True) if x != y}
                if addresses and a.addresses != b.addresses:
                    changed[kernel].add("addresses")
    return {kernel: names for kernel, names in changed.items() if names}


@dataclass
class StaticForm:
    """What static steps of many sets of layouts did.

    steps, buckets, opened: how many, and steps that open a bucket or double the table of gate rows.
    changed: by kernel, what differs within a bucket.  reordered: further orders of kernels within a bucket.
    host: the most of each count in a step that opens nothing.  opening: tensors made in one that does, at most.
    launches: the most in a step.  requests: how many shared a step, by the rows of the bucket.
    """

    steps: int
    buckets: int
    opened: int
    changed: dict[str, set[str]]
    reordered: int
    host: dict[str, int]
    opening: int
    launches: int
    requests: dict[int, set[int]]

    @classmethod
    def of(cls, taken: list[tuple[int, list[Step]]]) -> "StaticForm":
        """From (requests, steps) of each set of layouts, in the order in which they ran on one engine."""
        by_bucket: dict[Any, list[Step]] = defaultdict(list)
        opened: list[Step] = []
        later: list[Step] = []
        requests: dict[int, set[int]] = defaultdict(set)
        for size, steps in taken:
            # the last step also ends its requests, and what they leave to the cache is no part of decoding
            for step in steps[:-1]:
                assert step.bucket is not None, "a step of decodes alone"
                (later if step.bucket in by_bucket else opened).append(step)
                by_bucket[step.bucket].append(step)
                requests[step.bucket[0]].add(size)
        changed: dict[str, set[str]] = defaultdict(set)
        for steps in by_bucket.values():
            for kernel, names in changes([step.launches for step in steps], addresses=True).items():
                changed[kernel] |= names
        orders = [{tuple(launch.kernel for launch in step.launches) for step in steps} for steps in by_bucket.values()]
        return cls(
            steps=len(opened) + len(later),
            buckets=len(by_bucket),
            opened=len(opened),
            changed=changed,
            reordered=sum(len(found) - 1 for found in orders),
            host=most(later),
            opening=max(step.host["memory"] for step in opened),
            launches=max(len(step.launches) for step in later),
            requests=requests,
        )


def most(steps: list[Step]) -> dict[str, int]:
    """The most of each count of the host in one of these steps."""
    return {kind: max(step.host[kind] for step in steps) for kind in ("memory", "copies", "waits")}


def _static_form(context_cache: str | None, size: int, sets: int, steps: int) -> StaticForm:
    """Static steps of sets of layouts of size, size - 1, ... size // 2 + 1 requests, over and over."""
    engine, taken = make_engine(context_cache, static_decode=True), []
    for seed in range(sets):
        count = size - seed % (size // 2)
        taken.append((count, decode_steps(engine, count, seed, steps, 246)))
    return StaticForm.of(taken)


def main() -> None:
    report = Report("decode_launches", arguments(__doc__))
    torch.set_num_threads(1)
    size, steps, sets = (4, 20, 4) if report.options.quick else (8, 40, 12)
    # prompts whose contexts cross the end of a page, and of 16 pages and the first split of keys, on the way
    engines = make_engine(), make_engine("hybrid")
    taken = [decode_steps(engine, size, seed, steps, 246) for engine in engines for seed in range(sets)]
    found = [[step.launches for step in one] for one in taken[:sets]]
    cached = [[step.launches for step in one] for one in taken[sets:]]
    # crosses pages, but no power of two
    steady = [step.launches for step in decode_steps(engines[0], size, 0, steps, prompt_tokens=140)]
    within: dict[str, set[str]] = defaultdict(set)
    for one in found:
        for kernel, names in changes(one).items():
            within[kernel] |= names
    between = changes([one[0] for one in found])
    sequences = len({tuple(launch.kernel for launch in one[0]) for one in found})
    rows = [
        (kernel, ", ".join(sorted(within.get(kernel, ()))) or "-", ", ".join(sorted(between.get(kernel, ()))) or "-")
        for kernel in sorted(within.keys() | between.keys())
    ]
    columns = ("kernel", "as contexts grow", "between layouts")
    report.table(f"What changes between decode steps of {size} requests", columns, rows)
    still = sorted({launch.kernel for one in found for launch in one[0]} - within.keys() - between.keys())
    report.say(
        f"contexts from 140 tokens on, between two powers of two of pages: {changes(steady) or 'nothing changes'}"
    )
    report.say(f"never: {', '.join(still)}")
    report.say(f"{sets} sets of layouts make {sequences} sequences of launches, of {len(found[0][0])} in the first")
    forms = {"without the context cache": (found, taken[:sets]), "with the context cache": (cached, taken[sets:])}
    host_rows: list[tuple] = []
    for name, (launches, both) in forms.items():
        # the last step of each also ends its requests, and what they leave to the cache is no part of decoding
        counts = most([step for one in both for step in one[:-1]])
        host_rows.append((name, max(len(step) for one in launches for step in one), *counts.values()))
    caches = zip(forms, (None, "hybrid"), strict=True)
    static = {"static, " + name: _static_form(cache, size, sets, steps) for name, cache in caches}
    host_rows += [(name, form.launches, *form.host.values()) for name, form in static.items()]
    columns = ("decode steps", "launches", "tensors made", "copies from the host", "waits of the host")
    report.table("The most in one step", columns, host_rows)
    for name, form in static.items():
        report.say(
            f"{name}: {form.steps} steps of {sets} sets of layouts in {form.buckets} buckets; within one, kernels, "
            f"their order, grids, numbers and addresses change so: {form.changed or 'not at all'}. {form.opened} steps "
            f"open a bucket or double the table of gate rows, with up to {form.opening} tensors"
        )
        kind = "cached" if "with the" in name else "plain"
        report.check(f"static_{kind}_changes", len(form.changed) + form.reordered, 0, "lower")
        for count, target in (("memory", 0), ("copies", 1), ("waits", 1)):
            report.check(f"static_{kind}_{count}", form.host[count], target, "lower")
    both_within = {name: sorted(set().union(*(changes(one) for one in launches)))
                   for name, (launches, _) in forms.items()}  # fmt: skip
    report.data.update(
        host=[dict(zip(columns, row, strict=True)) for row in host_rows],
        within_by_form=both_within,
        within_powers_of_two={kernel: sorted(names) for kernel, names in changes(steady).items()},
        batch=size,
        steps=steps,
        sets=sets,
        sequences=sequences,
        within={kernel: sorted(names) for kernel, names in within.items()},
        between={kernel: sorted(names) for kernel, names in between.items()},
        unchanged=still,
        static={
            name: {
                "steps": form.steps,
                "buckets": form.buckets,
                "opened": form.opened,
                "tensors made where a bucket is opened": form.opening,
                "requests by rows": {rows: sorted(sizes) for rows, sizes in sorted(form.requests.items())},
                "changed": {kernel: sorted(names) for kernel, names in form.changed.items()},
            }
            for name, form in static.items()
        },
    )
    report.finish()


if __name__ == "__main__":
    main()
