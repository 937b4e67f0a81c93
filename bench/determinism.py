"""How many requests keep every bit of tokens and logits, whatever they share the engine with.

Random requests (ragged prompts, greedy and sampled, adaptive, biased and forced layouts) run alone, then batched, with
their prompts cut into slices, in a small pool and preempted at random, and twice, the second time with their prompts
cached. A request counts where its layout, its tokens and all its logits are equal to the last bit.

    python bench/determinism.py [--quick] [--json]
"""

import random

import torch
from common import Report, arguments

from flexops.runtime import Engine, RequestOutput
from tests.runtime.serving import Asked, Given, alone, random_requests, serve, small_engine
from tests.tiny import make_model


def fraction(asked: list[Asked], given: list[Given], expected: list[Given]) -> float:
    return sum(a.same_bits(b) for a, b in zip(given, expected, strict=True)) / len(asked)


def preempt_at_random(engine: Engine) -> None:
    """Preempt a running request now and then, besides those for which memory ends."""
    step, rng = engine.step, random.Random(3)

    def preempting() -> list[RequestOutput]:
        if engine.scheduler.running and rng.random() < 0.2:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        return step()

    engine.step = preempting  # type: ignore[method-assign]


def main() -> None:
    report = Report("determinism", arguments(__doc__))
    count = 60 if report.options.quick else 240
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(num_hidden_layers=4, layers_without_ffn=[1]).to(dtype)
        asked = random_requests(model, count, longest=90, seed=11)
        expected = [alone(model, a, context_cache=None) for a in asked]
        pages = [
            small_engine(model).tables.pages_for_all([-1] * 4, len(a.prompt) + a.params.max_new_tokens) for a in asked
        ]
        page_bytes = small_engine(model).pool.layout.page_bytes
        engines: dict[str, Engine] = {
            "batched": small_engine(model, memory_bytes=1 << 26),
            "sliced": small_engine(model, max_batched_tokens=29, decode_slowdown=None),
            "cached": small_engine(model, memory_bytes=1 << 26),
            "preempted": small_engine(model, memory_bytes=(max(pages) + 20) * page_bytes),
        }
        preempt_at_random(engines["preempted"])
        for name, engine in engines.items():
            twice = 2 if name == "cached" else 1
            value = fraction(asked * twice, serve(engine, asked * twice), expected * twice)
            suffix = "" if dtype == torch.float32 else "_bf16"
            report.check(f"bit_equal_{name}{suffix}", value, 1.0)
            report.data[f"{name}_{dtype}"] = {
                "requests": count,
                "steps": engine.metrics.steps,
                "preemptions": engine.scheduler.preemptions,
                "cached_tokens": engine.stats()["cached_tokens"],
            }
    report.finish()


if __name__ == "__main__":
    main()
