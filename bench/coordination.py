"""Branch coordination (§5.2): how well branch times are predicted, and on a GPU what running both at once gains.

Everywhere: the parts of a layer (attention, SSM, FFN) of a model of random weights are timed on many batches of decodes
and prefills; the cost model is fitted to three quarters of them and predicts the rest, four times, so that each batch
is predicted once by a fit that has not seen it. The spread of repeated runs stands beside the error: no model can be
better than what it is compared with. On a CPU times are those of the thread, as in a profile; the same predictions are
compared with the clock on the wall too, which also counts what other programs take.
On a GPU, as in Fig. 11: end-to-end time at batch 2..16 with one branch after the other, on two plain streams, on
partitioned SMs, and with fused decodes besides; then one layer's decodes by each form, against the time that their
bytes take at the speed of a copy. Without a GPU nothing runs at once, so there is nothing to compare.

    python bench/coordination.py [--quick] [--json] [--plot PNG]
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import Report, arguments, interleave, spread
from layouts import draw_layouts
from least_bytes import LEAST

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.models.packed import PackedModel
from flexops.runtime import Engine, SamplingParams
from flexops.runtime.branches import fork_join
from flexops.runtime.measuring import draw_loads, measure, time_us
from flexops.runtime.partition import PartitionUnavailable, SMPartitions
from flexops.runtime.profiling import PART_NAMES, fit
from tests.kernels import inputs

ERROR_TARGET = 0.05  # the paper: within 6.32% for attention and 5.18% for the SSM branch
E2E_TARGET, E2E_MEAN_TARGET = 1.02, 0.783  # at no batch slower; the paper's smallest mean reduction, 21.7%
BANDWIDTH_TARGET = 0.8  # 1.25 times the bytes over the bandwidth of a copy
FOLDS = 4
SIDES = {"serial": False, "streams": "streams", "partition": True, "fused": True}  # "fused" is all that True gives
NO_GPU = "no GPU: the branches run one after the other, and only their prediction was measured"
FORMS = ("serial", "streams", "partition", "fused")


def make_model(device: torch.device) -> FlexHybridModel:
    """12 adaptive layers of a size that a CPU decodes at some hundred tokens/s; on a GPU 16 of some billion in all."""
    torch.manual_seed(0)
    gpu = device.type == "cuda"
    config = FlexHybridConfig(
        vocab_size=8192,
        hidden_size=2048 if gpu else 256,
        intermediate_size=8192 if gpu else 768,
        num_hidden_layers=16 if gpu else 12,
        num_attention_heads=16 if gpu else 8,
        num_key_value_heads=4 if gpu else 2,
        head_dim=128 if gpu else 32,
        mamba_n_heads=64 if gpu else 8,
        mamba_d_head=64,
        mamba_d_state=128 if gpu else 64,
        max_position_embeddings=8192,
        initializer_range=0.02 if gpu else 0.05,
    )
    with device:
        return FlexHybridModel(config).to(torch.bfloat16 if gpu else torch.float32).eval()


# --- the cost model -------------------------------------------------------------------------------------------


def prediction_errors(model: FlexHybridModel, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Per part the measured and predicted microseconds, and the spread, of batches that the fit has not seen."""
    with torch.no_grad():
        packed = PackedModel(model, model.config.max_position_embeddings)
    rng = np.random.default_rng(1)
    loads = draw_loads(160, 16, 256 if quick else 512, 1024 if quick else 4096, rng)
    samples = measure(packed, loads, rounds=30 if quick else 60, budget_s=25 if quick else 240)
    found = {}
    for part, name in PART_NAMES.items():
        mine = [s for s in samples if s.part == part]
        fold, predicted = rng.permutation(len(mine)) % FOLDS, np.zeros(len(mine))
        for k in range(FOLDS):
            profile = fit([s for s, f in zip(mine, fold, strict=True) if f != k], model.config, {})
            for i in np.flatnonzero(fold == k):
                predicted[i] = profile.predict_us(part, mine[i].load, model.config)
        found[name] = {
            "measured_us": [s.us for s in mine],
            "predicted_us": predicted.tolist(),
            "spread": [s.spread for s in mine],
            "wall_us": [s.wall_us for s in mine],
            "wall_spread": [s.wall_spread for s in mine],
        }
    return found


def report_errors(report: Report, found: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for name, points in found.items():
        predicted, measured, wall = (np.array(points[key]) for key in ("predicted_us", "measured_us", "wall_us"))
        errors, wall_errors = np.abs(predicted / measured - 1), np.abs(predicted / wall - 1)
        noise, median = statistics.median(points["spread"]), float(np.median(errors))
        found_here = median, float(np.quantile(errors, 0.9)), float(errors.max()), noise
        on_wall = float(np.median(wall_errors)), statistics.median(points["wall_spread"])
        rows.append((name, len(errors), *found_here, *on_wall))
        report.check(f"{name}_error_median", median, ERROR_TARGET, "lower", noise)
    columns = ("part", "batches", "median error", "90th percentile", "largest", "spread of a run",
               "median error on the wall clock", "spread on the wall clock")  # fmt: skip
    report.table("Times predicted for batches outside of the fit: errors as fractions of the measured", columns, rows)
    names = ("part", "batches", "median", "p90", "largest", "spread", "wall_median", "wall_spread")
    report.data["errors"] = [dict(zip(names, row, strict=True)) for row in rows]
    report.data["predictions"] = found


# --- end to end and per layer, on a GPU -----------------------------------------------------------------------


def serve(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> None:
    """`batch` requests with layouts drawn as in Fig. 13, to completion."""
    for i, layout in enumerate(draw_layouts(engine.model_config.num_hidden_layers, batch, seed=batch)):
        prompt = [(7 * i + j) % 8000 for j in range(prompt_tokens)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens), layout)
    while engine.has_unfinished():
        engine.step()


def end_to_end(report: Report, model: FlexHybridModel, batches: tuple[int, ...], prompt: int, new: int) -> None:
    """Fig. 11: seconds per batch with each side, and the check against one branch after the other."""
    config = {"memory_bytes": (8 if model.device.type == "cuda" else 1) << 30, "context_cache": None}
    engines = {name: Engine(model, EngineConfig(coordination=value, **config)) for name, value in SIDES.items()}
    if (coordinator := engines["partition"].executor.coordinator) is not None:
        coordinator.fused = False
    rows, ratios, noises = [], [], []
    for batch in batches:
        sides = {name: partial(serve, engine, batch, prompt, new) for name, engine in engines.items()}
        times = interleave(sides, rounds=5)
        ratios.append(times.ratio("fused", "serial"))
        noises.append(spread(times.ratios("fused", "serial")))
        rows.append((str(batch), *(times.median(side) for side in SIDES), ratios[-1]))
    report.table(
        f"End-to-end seconds, prompts of {prompt} tokens and {new} new ones",
        ("batch", *SIDES, "fused / serial"),
        rows,
    )
    report.data["end_to_end"] = [dict(zip(("batch", *SIDES, "ratio"), row, strict=True)) for row in rows]
    report.check("coordination_vs_serial", max(ratios), E2E_TARGET, "lower", max(noises))
    report.check("coordination_vs_serial_mean", statistics.mean(ratios), E2E_MEAN_TARGET, "lower", max(noises))


def decode_forms(arguments: tuple, device: torch.device) -> dict[str, Callable[[], object]]:
    """One layer's decodes: the two kernels in turn, on two streams, on the middle partition, and the fused launch."""
    from flexops.kernels.dispatch import select

    ops = select(device)
    q, cache, table, lens, scale, *ssm = arguments
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=device)

    def attention() -> torch.Tensor:
        return ops.paged_attention(q, cache, table, rows, lens, scale, 1)

    def update() -> torch.Tensor:
        return ops.state_update(*ssm)[0]

    forms: dict[str, Callable[[], object]] = {
        "serial": lambda: (attention(), update()),
        "fused": lambda: ops.decode_branches(*arguments),
    }
    if device.type == "cuda":
        plain = torch.cuda.Stream(device), torch.cuda.Stream(device)
        forms["streams"] = lambda: fork_join(plain, attention, update)
        try:
            made = SMPartitions(0)
        except PartitionUnavailable:
            return forms
        handles = made.streams[len(made.streams) // 2]
        pair = tuple(torch.cuda.ExternalStream(handle, device=device) for handle in handles)
        # the partitions live as long as the function that uses them
        forms["partition"] = lambda made=made: fork_join(pair, attention, update)
    return forms


def layer_decodes(report: Report, device: torch.device, batches: tuple[int, ...], context: int, repeats: int) -> None:
    """Microseconds of each form for half a batch of attention and half of SSM requests, and the bandwidth reached.

    One SSM request of each batch is padding. The check is of the largest batch, which no cache holds.
    """
    bytes_per_us = copy_bandwidth(device)
    rows, shares = [], []
    for batch in batches:
        size = inputs.Size(
            lengths=(1,) * (batch // 2),
            cached=(context - 1,) * (batch // 2),
            hidden=64,
            ffn=64,
            q_heads=16,
            kv_heads=4,
            head_dim=128,
            page_tokens=16,
            ssm_heads=64,
            ssm_head_dim=64,
            groups=1,
            d_state=128,
        )
        call = inputs.arguments("decode_branches", size, torch.bfloat16, device)
        forms = decode_forms(call, device)
        times = interleave({name: partial(repeat, form, repeats) for name, form in forms.items()}, rounds=9)
        least_us = LEAST["decode_branches"](*call) / bytes_per_us
        us = {name: times.median(name) * 1e6 / repeats for name in forms}
        shares.append(least_us / min(us.values()))
        rows.append((str(batch), *(us.get(name, "-") for name in FORMS),
                     least_us, shares[-1]))  # fmt: skip
    columns = ("batch", *FORMS, "bytes / bandwidth", "share of bandwidth")
    report.table(f"One layer's decodes in microseconds, contexts of {context}", columns, rows)
    report.data["layer_decodes"] = [dict(zip(columns, row, strict=True)) for row in rows]
    report.check("decode_vs_bandwidth", shares[-1], BANDWIDTH_TARGET)


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per microsecond that a copy reads and writes."""
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(time_us(lambda: target.copy_(source), device)[0] for _ in range(9))


def main() -> None:
    report = Report("coordination", arguments(__doc__, plot=True))
    quick = report.options.quick
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # branches this small gain nothing from a second
    model = make_model(device)
    begin = time.perf_counter()
    found = prediction_errors(model, quick)
    report.data["profile_seconds"] = time.perf_counter() - begin
    report_errors(report, found)
    if device.type == "cuda":
        end_to_end(report, model, (2, 8) if quick else (2, 4, 8, 16), *((256, 32) if quick else (1024, 128)))
        layer_decodes(report, device, (4, 16) if quick else (4, 8, 16, 64, 256), 4096, repeats=20)
    else:
        report.say(NO_GPU)
    if report.options.plot:
        plot(report.data, report.options.plot)
    report.finish()


def plot(data: dict, path: Path) -> None:
    """Predicted over measured times of each part; on a GPU also Fig. 11, end to end and for one layer's decodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    on_gpu = "end_to_end" in data
    panels = len(data["predictions"]) + 2 * on_gpu
    figure, axes = plt.subplots(1, panels, figsize=(3.6 * panels, 3.8))
    for axis, (name, points) in zip(axes, data["predictions"].items(), strict=False):
        measured, predicted = points["measured_us"], points["predicted_us"]
        low, high = 0.9 * min(measured), 1.1 * max(measured)
        axis.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], alpha=0.2, label="±5%")
        axis.loglog(measured, predicted, "o", markersize=3)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        found = next(e for e in data["errors"] if e["part"] == name)
        title = f"{name}: median error {found['median']:.1%}\n(spread of a run {found['spread']:.1%})"
        axis.set(title=title, xlabel="measured µs", ylabel="predicted µs")
        axis.legend(frameon=False)
    if on_gpu:
        panes = (("end_to_end", SIDES, "end to end", "seconds"), ("layer_decodes", FORMS, "decodes of a layer", "µs"))
        for axis, (name, sides, title, unit) in zip(axes[-2:], panes, strict=True):
            rows = [row for row in data[name] if int(row["batch"]) <= 16]
            for side in sides:
                there = [(int(row["batch"]), row[side]) for row in rows if row[side] != "-"]
                if there:
                    axis.plot(*zip(*there, strict=True), "o-", label=side)
            axis.set(title=title, xlabel="batch size", ylabel=unit, ylim=(0, None))
            axis.legend(frameon=False)
    else:
        figure.text(0.5, 0.01, NO_GPU, ha="center", fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
