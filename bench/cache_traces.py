"""Request traces that a context cache meets in practice, and the hit rate of an eviction policy over them."""

import random
from collections.abc import Callable, Iterator

from layouts import draw_layouts
from uncomputed import uncomputed_engine

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import SamplingParams

Trace = Iterator[tuple[list[int], int]]  # prompts, and which of the drawn layouts each takes


def _text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(2, 4096) for _ in range(tokens)]


def shared_articles(rng: random.Random, requests: int) -> Trace:
    """Questions on twelve articles, some asked about more often than others."""
    articles = [_text(rng, 256) for _ in range(12)]
    for _ in range(requests):
        popular = rng.choices(articles, [1 / (i + 1) for i in range(len(articles))])[0]
        yield popular + _text(rng, 12), rng.randrange(6)


def conversations(rng: random.Random, requests: int) -> Trace:
    """Ten conversations at once, each turn the whole conversation so far; one that has grown long is replaced."""
    talks = [(_text(rng, 24), rng.randrange(6)) for _ in range(10)]
    for _ in range(requests):
        i = rng.randrange(len(talks))
        text, layout = talks[i]
        yield text, layout
        talks[i] = (text + _text(rng, 40), layout) if len(text) < 400 else (_text(rng, 24), rng.randrange(6))


def agents(rng: random.Random, requests: int) -> Trace:
    """A long system prompt for all, a tool description for each of eight agents, then the task."""
    system = _text(rng, 192)
    tools = [_text(rng, 96) for _ in range(8)]
    for _ in range(requests):
        yield system + rng.choice(tools) + _text(rng, 24), rng.randrange(6)


def polluted(rng: random.Random, requests: int) -> Trace:
    """Four articles in steady use, with bursts of long prompts that never come back."""
    articles = [_text(rng, 256) for _ in range(4)]
    for i in range(requests):
        if i % 20 < 8:
            yield _text(rng, 300), rng.randrange(6)
        else:
            yield rng.choice(articles) + _text(rng, 12), rng.randrange(6)


TRACES: dict[str, Callable[[random.Random, int], Trace]] = {
    "shared articles": shared_articles,
    "conversations": conversations,
    "agents": agents,
    "polluting scan": polluted,
}


def hit_rates(
    model: FlexHybridModel, trace: Callable, capacity_bytes: int, requests: int, seed: int
) -> tuple[float, float]:
    """Effective hit rates of Eq. 5 and of least recently used over one draw of a trace. Rows are not computed."""
    layouts = draw_layouts(model.config.num_hidden_layers, 400, rising=True)
    distinct = list(dict.fromkeys(map(tuple, layouts)))[:6]
    rates = []
    for eviction in ("value", "lru"):
        config = EngineConfig(memory_bytes=1 << 29, cache_bytes=capacity_bytes, cache_eviction=eviction)
        engine = uncomputed_engine(model, config)
        for prompt, layout in trace(random.Random(seed), requests):
            engine.add_request(prompt, SamplingParams(max_new_tokens=1), list(distinct[layout]))
            while engine.has_unfinished():
                engine.step()
        rates.append(engine.stats()["cache_hit_rate"])
    return rates[0], rates[1]
