"""The context cache (§6) against a conventional one and against none: the paper's Fig. 12, and what a hit costs.

Shared articles with different questions come in random order, each request with a layout drawn as in Fig. 13, under a
fixed cache capacity. Effective hit rate: token-layers that were not computed over all token-layers of the prompts;
what was replayed or rebuilt counts as computed; beside it what no cache could exceed (`cache_bound.py`). Then: time to
the first token, one request after another, and where they arrive at random, at 9/10 of the rate that the engine with
the conventional cache serves (the paper's seconds are those of a queue); the same prompt twice, prefixes of every
length, the cost of looking up and publishing, and Eq. 5 against least recently used over fixed traces.

    python bench/context_cache.py [--quick] [--json] [--plot PNG] [--only fig12|ttft|warm|lengths|lookup|policy]
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from cache_bound import most_saved, most_saved_knowing_shares
from cache_traces import TRACES, hit_rates
from common import Report, arguments, spread
from layouts import draw_layouts
from uncomputed import uncomputed_engine

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.runtime import Engine, SamplingParams

ARTICLE_TOKENS, QUESTION_TOKENS = 384, 16
# The paper tells neither how many questions an article has nor the capacity, but what the conventional cache gets: 7%
# at 20 articles, 18.7% over all settings. With these two it gets about that here.
QUESTIONS = 24
CAPACITY_ARTICLES = 16  # of one layout each
DRAWS = 3  # of articles, order and layouts
LOAD = 0.9  # arrivals over what the engine with the conventional cache serves one after another
KINDS = ("hybrid", "conventional")
PARTS = ("fig12", "ttft", "warm", "lengths", "lookup", "policy")


def make_model(hidden_size: int = 256) -> FlexHybridModel:
    """12 adaptive layers of a size that a CPU prefills at some thousand tokens/s."""
    torch.manual_seed(0)
    config = FlexHybridConfig(
        vocab_size=4096,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=12,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        mamba_n_heads=hidden_size // 32,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_chunk_size=64,
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    return FlexHybridModel(config).eval()


def article_bytes(model: FlexHybridModel) -> int:
    """KV or state of one article in every layer, half of the layers taking each route."""
    config = model.config
    kv = 2 * config.num_key_value_heads * config.head_dim * 4 * ARTICLE_TOKENS
    state = config.d_inner * config.mamba_d_state * 4 + config.conv_dim * config.mamba_d_conv * 4
    return config.num_hidden_layers * (kv + state) // 2


def cache_room(model: FlexHybridModel) -> int:
    """Bytes that the caches have."""
    return CAPACITY_ARTICLES * article_bytes(model)


def draw(model: FlexHybridModel, articles: int, number: int, rising: bool = True) -> tuple[list, list]:
    """Prompts and layouts, of draw `number`."""
    seed = articles + 1000 * number
    prompts = shared_articles(articles, seed)
    return prompts, draw_layouts(model.config.num_hidden_layers, len(prompts), seed, rising)


def shared_articles(articles: int, seed: int) -> list[list[int]]:
    """Prompts of articles, each with its questions, in random order."""
    rng = random.Random(seed)
    texts = [[rng.randrange(2, 4096) for _ in range(ARTICLE_TOKENS)] for _ in range(articles)]
    prompts = [text + [rng.randrange(2, 4096) for _ in range(QUESTION_TOKENS)] for text in texts * QUESTIONS]
    rng.shuffle(prompts)
    return prompts


def bounds(model: FlexHybridModel, prompts: list[list[int]], layouts: list[list[str]]) -> tuple[float, float]:
    """Hit rates: what no cache exceeds, and what is expected of the best choice beforehand, knowing layouts' shares."""
    config = model.config
    row = 4 * ARTICLE_TOKENS  # bytes of an fp32 column
    entry_bytes = {
        "attention": 2 * config.num_key_value_heads * config.head_dim * row,
        "ssm": 4 * (config.d_inner * config.mamba_d_state + config.conv_dim * config.mamba_d_conv),
    }
    requests = [(tuple(p[:ARTICLE_TOKENS]), tuple(layout)) for p, layout in zip(prompts, layouts, strict=True)]
    token_layers = len(prompts[0]) * len(prompts) * config.num_hidden_layers
    any_choice, fixed = (
        most(requests, entry_bytes, config.hidden_size * row, cache_room(model)) * ARTICLE_TOKENS / token_layers
        for most in (most_saved, most_saved_knowing_shares)
    )
    return any_choice, fixed


def serve(engine: Engine, prompts: list[list[int]], layouts: list[list[str]]) -> list[float]:
    """Seconds to the first token of each prompt, one after another."""
    times = []
    for prompt, layout in zip(prompts, layouts, strict=True):
        begin = time.perf_counter()
        engine.add_request(prompt, SamplingParams(max_new_tokens=1), layout)
        while engine.has_unfinished():
            engine.step()
        times.append(time.perf_counter() - begin)
    return times


def serve_arrivals(engine: Engine, prompts: list[list[int]], layouts: list[list[str]], arrivals: list[float]) -> float:
    """Mean seconds from the arrival of a prompt to its first token. arrivals: seconds from the start."""
    waits: list[float] = []
    arrived_at: dict[int, float] = {}
    waiting = list(zip(arrivals, prompts, layouts, strict=True))[::-1]
    begin = time.perf_counter()
    while waiting or engine.has_unfinished():
        now = time.perf_counter() - begin
        while waiting and waiting[-1][0] <= now:
            arrival, prompt, layout = waiting.pop()
            arrived_at[engine.add_request(prompt, SamplingParams(max_new_tokens=1), layout)] = arrival
        if engine.has_unfinished():
            outputs = engine.step()
            now = time.perf_counter() - begin
            waits += [now - arrived_at[output.request_id] for output in outputs]
        else:
            time.sleep(max(0.0, waiting[-1][0] - now))
    return statistics.fmean(waits)


def cache_config(cache: str | None, capacity: int | None = None) -> EngineConfig:
    return EngineConfig(memory_bytes=1 << 30, context_cache=cache, cache_bytes=capacity, reuse_generated=False)


def make_engine(model: FlexHybridModel, cache: str | None, capacity: int | None = None) -> Engine:
    return Engine(model, cache_config(cache, capacity))


def fig12(report: Report, model: FlexHybridModel) -> None:
    """Hit rates over the number of articles, for both caches; rows are not computed, layouts are given."""
    draws, room = 1 if report.options.quick else DRAWS, cache_room(model)
    settings = (2, 20) if report.options.quick else (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
    rows = []
    for articles, rising in [*((articles, True) for articles in settings), (settings[0], False), (settings[-1], False)]:
        columns = []
        for number in range(draws):
            prompts, layouts = draw(model, articles, number, rising)
            rates = []
            for kind in KINDS:
                engine = uncomputed_engine(model, cache_config(kind, room))
                serve(engine, prompts, layouts)
                rates.append(engine.stats()["cache_hit_rate"])
            most, fixed = bounds(model, prompts, layouts)
            assert max(rates) <= most, "a bound that was exceeded"
            columns.append((*rates, fixed, most))
        means = [statistics.fmean(column) for column in zip(*columns, strict=True)]
        rows.append((f"{articles}{'' if rising else ' (flat draw)'}", *means))
    columns_of = ("articles", "hit rate", "conventional", "knowing shares", "at most")
    title = f"Shared articles, {QUESTIONS} questions each, {draws} draws, cache of {room / 1e6:.1f} MB"
    report.table(title, columns_of, rows)
    swept = rows[: len(settings)]
    ours, theirs, fixed, most = (statistics.fmean(row[i] for row in swept) for i in (1, 2, 3, 4))
    if not report.options.quick:  # means over all settings are what the aims are for
        report.check("hit_rate_mean", ours, 0.434)
        report.check("hit_rate_vs_conventional", ours / theirs, 2.5)
    report.check("hit_rate_20_vs_conventional", swept[-1][1] / swept[-1][2], 3.4)
    report.data |= {"conventional_mean": theirs, "knowing_shares_mean": fixed, "most_mean": most}
    names = ("articles", "hit_rate", "conventional_hit_rate", "most_knowing_shares", "most")
    report.data["fig12"] = [dict(zip(names, row, strict=True)) for row in rows]


def ttft(report: Report, model: FlexHybridModel) -> None:
    """TTFT of one request after another, and where they arrive at random, for both caches."""
    room, rows = cache_room(model), []
    for kind in KINDS:  # operators are compiled when they are first called
        serve(make_engine(model, kind, room), shared_articles(1, seed=0)[:3], [["attention"] * 6 + ["ssm"] * 6] * 3)
    for articles in (8,) if report.options.quick else (4, 12, 20):
        prompts, layouts = draw(model, articles, 0)
        if report.options.quick:
            prompts, layouts = prompts[:64], layouts[:64]
        engines = {kind: make_engine(model, kind, room) for kind in KINDS}
        alone: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for prompt, layout in zip(prompts, layouts, strict=True):
            for kind, engine in engines.items():
                alone[kind] += serve(engine, [prompt], [layout])
        gap_s = statistics.fmean(alone["conventional"]) / LOAD
        waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for seed in range(1 if report.options.quick else 2):
            rng = random.Random(f"{articles} {seed}")
            arrivals = list(itertools.accumulate(rng.expovariate(1 / gap_s) for _ in prompts))
            for kind, of_kind in waits.items():
                of_kind.append(serve_arrivals(make_engine(model, kind, room), prompts, layouts, arrivals))
        times = [1e3 * statistics.fmean(seconds[kind]) for seconds in (alone, waits) for kind in KINDS]
        rows.append((articles, times[0], times[1], times[0] / times[1], times[2], times[3], times[2] / times[3]))
    columns = ("articles", "alone, ms", "conventional", "ratio", "with a queue, ms", "conventional", "ratio")
    report.table(f"Time to the first token; arrivals at {LOAD:.0%} of what a conventional cache serves", columns, rows)
    report.check("ttft_alone_vs_conventional", statistics.fmean(row[3] for row in rows), 1.0, "lower")
    report.check("ttft_vs_conventional", statistics.fmean(row[6] for row in rows), 0.5, "lower")
    names = ("articles", "alone_ms", "conventional_alone_ms", "alone_ratio", "queue_ms", "conventional_queue_ms",
             "queue_ratio")  # fmt: skip
    report.data["ttft"] = [dict(zip(names, row, strict=True)) for row in rows]


def plot(hit_rates_of: list[dict], ttft_of: list[dict], path: Path) -> None:
    """Fig. 12: hit rate and TTFT over the number of articles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    panels = (
        (rates, hit_rates_of, "effective hit rate", "hit_rate", "conventional_hit_rate"),
        (times, ttft_of, "time to first token with a queue, ms", "queue_ms", "conventional_queue_ms"),
    )
    for axis, rows, label, ours, theirs in panels:
        articles = [int(row["articles"]) for row in rows]
        for style, key, name in (("o-", ours, "hybrid-aware"), ("s--", theirs, "conventional")):
            axis.plot(articles, [row[key] for row in rows], style, label=name)
        axis.set(xlabel="articles", ylabel=label, ylim=(0, None), xticks=range(4, 21, 4))
    bound = [row["most_knowing_shares"] for row in hit_rates_of]
    rates.plot([int(row["articles"]) for row in hit_rates_of], bound, "k:", label="fixed, knowing the layouts' shares")
    for axis in (rates, times):
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def warm(report: Report, model: FlexHybridModel) -> None:
    """The same prompt twice: what the second one computes, and its time to first token."""
    rng = random.Random(1)
    layout = draw_layouts(model.config.num_hidden_layers, 1, rising=True)
    ratios = []
    for _ in range(3 if report.options.quick else 7):
        prompt = [rng.randrange(2, 4096) for _ in range(2000)]
        engine = make_engine(model, "hybrid")
        cold, again = serve(engine, [prompt, prompt], layout * 2)
        ratios.append(again / cold)
        stats = engine.stats()
        computed = stats["cache_looked_up_token_layers"] - stats["cache_saved_token_layers"]
        assert computed == 2001 * model.config.num_hidden_layers, "the second prefill computes its last token alone"
    report.check("warm_ttft_2000", statistics.median(ratios), 0.1, "lower", spread(ratios))


def lengths(report: Report, model: FlexHybridModel) -> None:
    """Prompts of every seventh length, then a prefix of each: the tokens that passed no layer again."""
    rng = random.Random(2)
    engine, missed, asked, before = make_engine(model, "hybrid"), 0, 0, 0
    for length in range(1, 301, 21 if report.options.quick else 7):
        prompt = [rng.randrange(2, 4096) for _ in range(length)]
        for shared in {length, 1 + rng.randrange(length)}:
            engine.clear_cache()
            for ids in (prompt, prompt[:shared]):
                engine.add_request(ids, SamplingParams(max_new_tokens=1), "ssm")
                while engine.has_unfinished():
                    engine.step()
            stats = engine.stats()
            computed = stats["cache_looked_up_token_layers"] - stats["cache_saved_token_layers"]
            passed = computed - stats["cache_replayed_token_layers"]
            asked += 1
            missed += passed - before != (length + 1) * model.config.num_hidden_layers
            before = passed
    report.check("prefixes_reused", (asked - missed) / asked, 1.0)


def lookup(report: Report, model: FlexHybridModel) -> None:
    """Milliseconds of a lookup among 10,000 prefixes; lookup and publishing as a share of a cold prefill."""
    rng = np.random.default_rng(0)
    engine = make_engine(model, "hybrid")
    cache = engine.cache
    assert cache is not None
    stem = rng.integers(2, 4096, 200).astype(np.int32)
    prefixes = [np.concatenate([stem[: rng.integers(200)], rng.integers(2, 4096, 300)]).astype(np.int32)
                for _ in range(10_000)]  # fmt: skip
    for prefix in prefixes:
        cache.pin(cache.insert(prefix))
    order = rng.permutation(len(prefixes))[:1000]
    begin = time.perf_counter()
    for i in order:
        cache.match(prefixes[i])
    report.check("lookup_ms_10000", 1e3 * (time.perf_counter() - begin) / len(order), 1.0, "lower")
    layout = draw_layouts(model.config.num_hidden_layers, 1, rising=True)
    # a page that is written for the first time has to be mapped by the system: that is most of what a new cache costs
    for suffix, mapped in (("", True), ("_new_pages", False)):
        sides: dict[str | None, Engine] = {kind: make_engine(model, kind) for kind in ("hybrid", None)}
        calls, whole = [], []
        for side in sides.values() if mapped else ():
            side.pool.memory.zero_()
        for i in range(4 if report.options.quick else 12):
            prompt = rng.integers(2, 4096, 512).tolist()
            with timed(sides["hybrid"].cache, "match", "insert", "acquire", "publish") as seconds:
                with_cache = serve(sides["hybrid"], [prompt], layout)[0]
            without = serve(sides[None], [prompt], layout)[0]
            if i:
                calls.append(sum(seconds) / without)
                whole.append(with_cache / without - 1)
        report.check(f"lookup_and_publish_share{suffix}", statistics.median(calls), 0.02, "lower", spread(calls))
        report.data[f"prefill_with_cache_over_without{suffix}"] = whole  # copies of rows and states that are kept, too


@contextmanager
def timed(thing: object, *names: str) -> Iterator[list[float]]:
    """Seconds of every call of some methods, without those from within another."""
    seconds: list[float] = []
    inside = [False]

    def timing(method: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            if inside[0]:
                return method(*args, **named)
            inside[0], begin = True, time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                inside[0] = False
                seconds.append(time.perf_counter() - begin)

        return call

    for name in names:
        setattr(thing, name, timing(getattr(thing, name)))
    try:
        yield seconds
    finally:
        for name in names:
            delattr(thing, name)


def policy(report: Report, model: FlexHybridModel) -> None:
    """Hit rates of Eq. 5 and of least recently used eviction over seeded traces, in half the room they would take."""
    small, rows = make_model(hidden_size=64), []
    requests, draws = (80, 1) if report.options.quick else (300, 5)
    for name, trace in TRACES.items():
        rates = [hit_rates(small, trace, 4 * article_bytes(small), requests, seed) for seed in range(7, 7 + draws)]
        ours, lru = (statistics.fmean(column) for column in zip(*rates, strict=True))
        rows.append((name, ours, lru, ours - lru))
    report.table("Eviction over fixed traces", ("trace", "Eq. 5", "LRU", "difference"), rows)
    report.check("mean_vs_lru", statistics.fmean(row[3] for row in rows), 0.0)
    report.check("worst_vs_lru", min(row[3] for row in rows), -0.01)
    report.data["policy"] = [dict(zip(("trace", "hit_rate", "lru", "difference"), row, strict=True)) for row in rows]


def main() -> None:
    parser = arguments(__doc__, plot=True)
    parser.add_argument("--only", choices=PARTS, action="append", help="run these parts alone")
    report = Report("context_cache", parser)
    model = make_model()
    parts: dict[str, Callable[[Report, FlexHybridModel], None]] = {
        "fig12": fig12, "ttft": ttft, "warm": warm, "lengths": lengths, "lookup": lookup, "policy": policy,
    }  # fmt: skip
    for name in report.options.only or PARTS:
        parts[name](report, model)
    if report.options.plot:
        plot(report.data["fig12"][:-2], report.data["ttft"], report.options.plot)
    report.finish()


if __name__ == "__main__":
    main()
