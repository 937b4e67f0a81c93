"""What still changes from one decode step to the next, of all that a CUDA graph would have to hold still (§5.2).

A graph replays the same kernels with the same grids and scalar arguments; only what pointers point to may change. Here
an engine decodes a fixed number of requests on the CPU, and beside each operator that computes the step the Triton
launches that a GPU would make for it are recorded, not run, with the rows of every matrix product. Steps are compared
within one set of layouts, where only contexts grow, and between sets of layouts. No GPU is needed.

    python bench/decode_launches.py [--quick] [--json]
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from common import Report, arguments
from layouts import draw_layouts

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.kernels import cpu
from flexops.kernels.linear import PackedLinear
from flexops.runtime import Engine, SamplingParams
from flexops.runtime.branches import BranchCoordinator
from flexops.runtime.coordination import CostModel, DeviceSpeed


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, and by name what is fixed in it besides pointers; "grid" is one of the names."""

    kernel: str
    fixed: tuple[tuple[str, object], ...]


@contextmanager
def recording(engine: Engine) -> Iterator[list[Launch]]:
    """The launches of the steps inside. The step itself is computed by the CPU's operators."""
    from triton.runtime.jit import JITFunction

    from flexops.kernels import triton_backend

    launches: list[Launch] = []
    run, linear, operators = JITFunction.run, PackedLinear.__call__, engine.executor.ops

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = self.signature.bind(*args, **{k: v for k, v in named.items() if not k.startswith("num_")})
        values = bound.arguments.items()
        fixed = tuple((k, v is None if v is None else v) for k, v in values if not isinstance(v, torch.Tensor))
        launches.append(Launch(self.fn.__name__.strip("_").removesuffix("_kernel"), (("grid", grid[0]), *fixed)))

    def record_linear(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        launches.append(Launch(f"linear {self.in_features} -> {self.out_features}", (("rows", x.shape[0]),)))
        return linear(self, x)

    def both(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            getattr(triton_backend, name)(*args)  # only recorded, so it writes nothing
            return getattr(cpu, name)(*args)

        return call

    JITFunction.run, PackedLinear.__call__ = record, record_linear
    engine.executor.ops = SimpleNamespace(**{name: both(name) for name in cpu.__all__})
    try:
        yield launches
    finally:
        JITFunction.run, PackedLinear.__call__, engine.executor.ops = run, linear, operators


def make_engine() -> Engine:
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
    engine = Engine(FlexHybridModel(config).eval(), EngineConfig(context_cache=None, memory_bytes=1 << 26))
    cost = CostModel(config, torch.float32, DeviceSpeed(1.0, 1.0))
    # a fork that costs for ever: prompts run one branch after the other, and decodes take the fused launch
    engine.executor.coordinator = BranchCoordinator(cost, True, [], [], num_sms=132, fork_join_us=float("inf"))
    return engine


def decode_steps(engine: Engine, batch: int, seed: int, steps: int, prompt_tokens: int) -> list[list[Launch]]:
    """The launches of each of `steps` decode steps of `batch` requests with layouts drawn by this seed."""
    for i, layout in enumerate(draw_layouts(engine.model_config.num_hidden_layers, batch, seed=seed)):
        prompt = [(7 * i + j) % 250 for j in range(prompt_tokens)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=steps + 1), layout)
    while engine.scheduler.waiting or any(not r.output for r in engine.scheduler.running):
        engine.step()
    found = []
    while engine.has_unfinished():
        with recording(engine) as launches:
            engine.step()
        found.append(list(launches))
    return found


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
    batch, steps, sets = (4, 20, 4) if report.options.quick else (8, 40, 12)
    engine = make_engine()
    # prompts whose contexts cross the end of a page, and of the first split of keys, on the way
    found = [decode_steps(engine, batch, seed, steps, prompt_tokens=246) for seed in range(sets)]
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
    report.table(f"What changes between decode steps of {batch} requests", columns, rows)
    still = sorted({launch.kernel for one in found for launch in one[0]} - within.keys() - between.keys())
    report.say(f"never: {', '.join(still)}")
    report.say(f"{sets} sets of layouts make {sequences} sequences of launches, of {len(found[0][0])} in the first")
    report.data.update(
        batch=batch,
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
