"""Everything together, and with one mechanism switched off in turn: the paper's Fig. 10.

A mixed workload: questions on shared articles beside prompts that share nothing, each with a layout drawn as in
Fig. 13, so many of them in flight at a time. The same requests go through an engine with everything on, one without
selective batching (each layout runs by itself) and one without the context cache.

    python bench/end_to_end.py [--quick] [--json] [--plot PNG]
"""

import random
import statistics
import time
from pathlib import Path

from common import Report, arguments, spread
from context_cache import make_model
from layouts import draw_layouts

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import Engine, SamplingParams

ARTICLES, ARTICLE_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 6, 320, 24, 24
SIDES = {
    "flexops": EngineConfig(memory_bytes=1 << 29),
    "w/o batching": EngineConfig(memory_bytes=1 << 29, selective_batching=False),
    "w/o cache": EngineConfig(memory_bytes=1 << 29, context_cache=None),
}


def make_requests(model: FlexHybridModel, count: int) -> list[tuple[list[int], list[str]]]:
    """Prompts and layouts: three of four ask about one of the articles, the others share nothing."""
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(2, model.config.vocab_size) for _ in range(tokens)]

    articles = [text(ARTICLE_TOKENS) for _ in range(ARTICLES)]
    layouts = draw_layouts(model.config.num_hidden_layers, count, rising=True)
    prompts = [
        (rng.choice(articles) if i % 4 else text(rng.randrange(16, ARTICLE_TOKENS))) + text(QUESTION_TOKENS)
        for i in range(count)
    ]
    return list(zip(prompts, layouts, strict=True))


def run(model: FlexHybridModel, config: EngineConfig, batch: int, requests: list) -> tuple[float, float, float]:
    """Tokens/s, mean milliseconds to the first token and per further token, `batch` requests in flight."""
    engine, waiting, flying = Engine(model, config), list(reversed(requests)), 0
    engine.pool.memory.zero_()  # in a server that has run for a while the system has mapped all pages
    begin = time.perf_counter()
    while waiting or flying:
        while waiting and flying < batch:
            prompt, layout = waiting.pop()
            engine.add_request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS), layout)
            flying += 1
        flying -= sum(output.finished for output in engine.step())
    seconds, stats = time.perf_counter() - begin, engine.stats()
    return NEW_TOKENS * len(requests) / seconds, stats["ttft_us_mean"] / 1e3, stats["tpot_us_mean"] / 1e3


def plot(rows: list[tuple], path: Path) -> None:
    """Fig. 10: throughput, TTFT and TPOT over the batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    titles = ("tokens/s", "time to first token, ms", "time per output token, ms")
    for axis, title, first in zip(axes, titles, (1, 4, 7), strict=True):
        for i, side in enumerate(SIDES):
            axis.plot([row[0] for row in rows], [row[first + i] for row in rows], "o-", label=side)
        axis.set(xlabel="requests in flight", ylabel=title, ylim=(0, None))
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    report = Report("end_to_end", arguments(__doc__, plot=True))
    quick, model = report.options.quick, make_model()
    batches, rounds, count = ((4, 16), 1, 32) if quick else ((2, 4, 8, 16, 32), 1, 64)
    requests, rows = make_requests(model, count), []
    ratios: dict[str, list[float]] = {}
    for batch in batches:
        results: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
        for i in range(rounds):
            for side in list(SIDES) if i % 2 == 0 else reversed(SIDES):
                results[side].append(run(model, SIDES[side], batch, requests))
        medians = [[statistics.median(r[k] for r in results[side]) for side in SIDES] for k in range(3)]
        rows.append((batch, *(value for metric in medians for value in metric)))
        for ours, unbatched, uncached in zip(*results.values(), strict=True):
            ratios.setdefault("throughput_vs_no_batching", []).append(ours[0] / unbatched[0])
            ratios.setdefault("throughput_vs_no_cache", []).append(ours[0] / uncached[0])
            ratios.setdefault("ttft_vs_no_cache", []).append(ours[1] / uncached[1])
            ratios.setdefault("tpot_vs_no_batching", []).append(ours[2] / unbatched[2])
    columns = ["in flight", *(f"{metric} {side}" for metric in ("tok/s", "TTFT", "TPOT") for side in SIDES)]
    report.table("Fig. 10: everything on, and one mechanism off in turn (ms)", columns, rows)
    for name, values in ratios.items():
        better = "higher" if name.startswith("throughput") else "lower"
        report.check(name, statistics.median(values), 1.0, better, spread(values) if len(batches) == 1 else 0.0)
    report.data["batches"] = [dict(zip(columns, row, strict=True)) for row in rows]
    if report.options.plot:
        plot(rows, report.options.plot)
    report.finish()


if __name__ == "__main__":
    main()
