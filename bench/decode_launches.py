"""What still changes from one decode step to the next, of all that a CUDA graph would have to hold still (§5.2).

A graph replays the same kernels with the same grids and scalar arguments; only what pointers point to may change. Here
an engine decodes a fixed number of requests on the CPU, and beside each operator that computes the step the Triton
launches that a GPU would make for it are recorded, not run, with the rows of every matrix product. Steps are compared
within one set of layouts, where only contexts grow, and between sets of layouts, with the context cache (which keeps
gate rows of generated tokens) and without. What else a graph would not hold is counted per step: memory taken, copies
of the host's numbers, and results that the host waits for. No GPU is needed.

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
from flexops.kernels import cpu
from flexops.kernels.linear import PackedLinear
from flexops.runtime import Engine, SamplingParams, batch, executor
from flexops.runtime.branches import BranchCoordinator
from flexops.runtime.coordination import CostModel, DeviceSpeed
from flexops.runtime.sampler import Sampler


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, and by name what is fixed in it besides pointers; "grid" is one of the names."""

    kernel: str
    fixed: tuple[tuple[str, object], ...]


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
def recording(engine: Engine) -> Iterator[tuple[list[Launch], Counter[str]]]:
    """The launches of the steps inside, and what the host did besides. The CPU's operators compute the step."""
    from triton.runtime.jit import JITFunction

    from flexops.kernels import triton_backend

    launches: list[Launch] = []
    run, linear, operators = JITFunction.run, PackedLinear.__call__, engine.executor.ops
    engine.executor.records = False  # a replay would launch nothing of Triton's
    send, sample, host = batch.on_device, Sampler.sample, Host()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = self.signature.bind(*args, **{k: v for k, v in named.items() if not k.startswith("num_")})
        values = bound.arguments.items()
        fixed = tuple((k, v is None if v is None else v) for k, v in values if not isinstance(v, torch.Tensor))
        launches.append(Launch(self.fn.__name__.strip("_").removesuffix("_kernel"), (("grid", grid[0]), *fixed)))

    def record_linear(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        launches.append(Launch(f"linear {self.in_features} -> {self.out_features}", (("rows", x.shape[0]),)))
        host.counts["memory"] += 1
        return unseen(linear, self, x)

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

    def record_sample(*args: Any) -> Any:
        host.counts["waits"] += 1  # tokens: a step ends with them
        return unseen(sample, *args)

    def both(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            getattr(triton_backend, name)(*args)  # only recorded, so it writes nothing
            return unseen(getattr(cpu, name), *args)

        return call

    JITFunction.run, PackedLinear.__call__ = record, record_linear
    engine.executor.ops = SimpleNamespace(**{name: both(name) for name in cpu.__all__})
    batch.on_device = executor.on_device = record_send
    Sampler.sample = record_sample
    try:
        with host:
            yield launches, host.counts
    finally:
        JITFunction.run, PackedLinear.__call__, engine.executor.ops = run, linear, operators
        batch.on_device = executor.on_device = send
        Sampler.sample = sample


def make_engine(context_cache: str | None = None) -> Engine:
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
    engine = Engine(FlexHybridModel(config).eval(), EngineConfig(context_cache=context_cache, memory_bytes=1 << 26))
    cost = CostModel(config, torch.float32, DeviceSpeed(1.0, 1.0))
    # a fork that costs for ever: prompts run one branch after the other, and decodes take the fused launch
    engine.executor.coordinator = BranchCoordinator(cost, True, [], [], num_sms=132, fork_join_us=float("inf"))
    return engine


def decode_steps(
    engine: Engine, size: int, seed: int, steps: int, prompt_tokens: int
) -> tuple[list[list[Launch]], list[Counter[str]]]:
    """The launches of each of `steps` decode steps of `size` requests with layouts drawn by this seed, and what the
    host did in them besides. With a context cache the gates choose the layouts: then their rows are kept."""
    for i, layout in enumerate(draw_layouts(engine.model_config.num_hidden_layers, size, seed=seed)):
        prompt = [(7 * i + j + seed) % 250 for j in range(prompt_tokens)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=steps + 1), None if engine.cache else layout)
    while engine.scheduler.waiting or any(not r.output for r in engine.scheduler.running):
        engine.step()
    found, hosts = [], []
    while engine.has_unfinished():
        with recording(engine) as (launches, host):
            engine.step()
        found.append(list(launches))
        hosts.append(Counter(host))
    return found, hosts


def changes(steps: list[list[Launch]]) -> dict[str, set[str]]:
    """By kernel, what differs between its launches in these steps, one by one; "number" where it has more or fewer."""

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
    return {kernel: names for kernel, names in changed.items() if names}


def main() -> None:
    report = Report("decode_launches", arguments(__doc__))
    torch.set_num_threads(1)
    size, steps, sets = (4, 20, 4) if report.options.quick else (8, 40, 12)
    # prompts whose contexts cross the end of a page, and of 16 pages and the first split of keys, on the way
    engines = make_engine(), make_engine("hybrid")
    taken = [decode_steps(engine, size, seed, steps, 246) for engine in engines for seed in range(sets)]
    found = [launches for launches, _ in taken[:sets]]
    cached = [launches for launches, _ in taken[sets:]]
    steady, _ = decode_steps(engines[0], size, 0, steps, prompt_tokens=140)  # crosses pages, but no power of two
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
    host_rows = []
    for name, (launches, both) in forms.items():
        # the last step of each also ends its requests, and what they leave to the cache is no part of decoding
        hosts = [host for _, counts in both for host in counts[:-1]]
        most = {kind: max(host[kind] for host in hosts) for kind in ("memory", "copies", "waits")}
        host_rows.append((name, max(len(step) for one in launches for step in one), *most.values()))
    columns = ("decode steps", "launches", "tensors made", "copies from the host", "waits of the host")
    report.table("The most in one step", columns, host_rows)
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
    )
    report.finish()


if __name__ == "__main__":
    main()
