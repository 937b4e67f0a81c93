"""Running requests through an engine, for tests: what each gave, and its bits."""

import random
from dataclasses import dataclass

import torch

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import Engine, RequestOutput, SamplingParams

MEMORY = 1 << 23


@dataclass(frozen=True)
class Asked:
    """A request as a test writes it down."""

    prompt: tuple[int, ...]
    params: SamplingParams
    layout: str | tuple[str, ...] | None = None
    gate_bias: float = 0.0


@dataclass
class Given:
    """What the engine gave for it."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    layout: tuple[int, ...]
    finish_reason: str | None

    def same_bits(self, other: "Given") -> bool:
        return (
            self.token_ids == other.token_ids
            and self.layout == other.layout
            and self.finish_reason == other.finish_reason
            and len(self.logits) == len(other.logits)
            and all(torch.equal(mine, theirs) for mine, theirs in zip(self.logits, other.logits, strict=True))
        )


def small_engine(model: FlexHybridModel, **changes: object) -> Engine:
    """An engine that proves its pool whole after every step and poisons what it frees."""
    return Engine(model, EngineConfig(**{"memory_bytes": MEMORY, "check_integrity": True, **changes}))


def collect(given: dict[tuple[int, int], Given], engine: Engine) -> list[RequestOutput]:
    """One step, its outputs added to what was given so far, and returned."""
    outputs = engine.step()
    for output in outputs:
        so_far = given.setdefault((output.request_id, output.sample), Given([], [], (), None))
        so_far.token_ids = output.token_ids
        so_far.logits.extend(output.logits or [])
        so_far.layout, so_far.finish_reason = output.layout, output.finish_reason
    return outputs


def serve(engine: Engine, asked: list[Asked]) -> list[Given]:
    """All requests together, to completion; the engine must be as empty as before."""
    given = [given for given, _ in run(engine, asked)]
    engine.clear_cache()
    assert engine.pool.free == engine.pool.num_pages and engine.pool.reserved == 0
    return given


def run(engine: Engine, asked: list[Asked]) -> list[tuple[Given, RequestOutput]]:
    """All requests together, to completion: what each gave, and its last output. What the cache holds stays."""
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in asked]
    given: dict[tuple[int, int], Given] = {}
    last: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        last.update({output.request_id: output for output in collect(given, engine)})
    return [(given[i, 0], last[i]) for i in ids]


def alone(model: FlexHybridModel, asked: Asked, **changes: object) -> Given:
    """The request by itself in a fresh engine."""
    return serve(small_engine(model, **changes), [asked])[0]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(2, 258) for _ in range(length))


def asking(
    prompt: tuple[int, ...], layout: str | tuple[str, ...] | None = None, new: int = 3, bias: float = 0.0
) -> Asked:
    """A greedy request that keeps its logits."""
    return Asked(prompt, SamplingParams(max_new_tokens=new, keep_logits=True), layout, bias)


def random_requests(model: FlexHybridModel, count: int, longest: int = 60, seed: int = 0) -> list[Asked]:
    """Prompts of 1..longest tokens, greedy and sampled, adaptive, biased and forced layouts."""
    rng = random.Random(seed)
    asked = []
    for i in range(count):
        length = rng.choice([1, 2, 3, rng.randint(4, longest), longest])
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 10), temperature=rng.choice([0.0, 0.0, 0.9]), seed=i, keep_logits=True
        )
        prompt = tuple(rng.randrange(model.config.vocab_size) for _ in range(length))
        layout = rng.choice([None, None, None, "attention", "ssm"])
        asked.append(Asked(prompt, params, layout, rng.choice([0.0, 0.7, -0.7])))
    return asked
