"""Branch coordination (§5.2): how well branch times are predicted, and on a GPU what running both at once gains.

Everywhere: the attention and the SSM branch of a model of random weights are timed on many batches of decodes and
prefills; the cost model is fitted to three quarters of them and predicts the rest, four times, so that each batch is
predicted once by a fit that has not seen it. The spread of repeated runs stands beside the error: no model can be
better than what it is compared with.
On a GPU, as in Fig. 11: end-to-end time at batch 2..16 with one branch after the other, on two plain streams, and
coordinated (partitioned SMs, fused decodes); then one layer's decodes by each form, against the time that their bytes
take at the speed of a copy.

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
from flexops.runtime.profiling import ROUTE_NAMES, fit
from tests.kernels import inputs

ERROR_TARGET = 0.05  # the paper: within 6.32% for attention and 5.18% for the SSM branch
E2E_TARGET = 0.783  # the paper's smallest mean reduction, 21.7%
BANDWIDTH_TARGET = 0.7
FOLDS = 4
SIDES = {"serial": False, "streams": "streams", "coordinated": True}


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
    """Per branch the measured and predicted microseconds, and the spread, of batches that the fit has not seen."""
    with torch.no_grad():
        packed = PackedModel(model, model.config.max_position_embeddings)
    rng = np.random.default_rng(1)
    loads = draw_loads(160, 16, 256 if quick else 512, 1024 if quick else 4096, rng)
    samples = measure(packed, loads, rounds=30 if quick else 60, budget_s=25 if quick else 240)
    found = {}
    for route, name in ROUTE_NAMES.items():
        mine = [s for s in samples if s.route == route]
        fold, predicted = rng.permutation(len(mine)) % FOLDS, np.zeros(len(mine))
        for k in range(FOLDS):
            profile = fit([s for s, f in zip(mine, fold, strict=True) if f != k], model.config, {})
            for i in np.flatnonzero(fold == k):
                predicted[i] = profile.predict_us(route, mine[i].load, model.config)
        found[name] = {
            "measured_us": [s.us for s in mine],
            "predicted_us": predicted.tolist(),
            "spread": [s.spread for s in mine],
        }
    return found


def report_errors(report: Report, found: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for name, points in found.items():
        errors = [abs(p / m - 1) for p, m in zip(points["predicted_us"], points["measured_us"], strict=True)]
        noise = statistics.median(points["spread"])
        cut = np.quantile(errors, 0.9)
        rows.append((name, len(errors), statistics.median(errors), float(cut), max(errors), noise))
        report.check(f"{name}_error_median", statistics.median(errors), ERROR_TARGET, "lower", noise)
    columns = ("branch", "batches", "median error", "90th percentile", "largest", "spread of a run")
    report.table("Branch times predicted for batches outside of the fit, as fractions of the measured", columns, rows)
    report.data["errors"] = [dict(zip(("branch", "batches", "median", "p90", "largest", "spread"), row, strict=True))
                             for row in rows]  # fmt: skip
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
    rows, ratios, noises = [], [], []
    for batch in batches:
        sides = {name: partial(serve, engine, batch, prompt, new) for name, engine in engines.items()}
        times = interleave(sides, rounds=5)
        ratios.append(times.ratio("coordinated", "serial"))
        noises.append(spread(times.ratios("coordinated", "serial")))
        rows.append((str(batch), *(times.median(side) for side in SIDES), ratios[-1]))
    report.table(
        f"End-to-end seconds, prompts of {prompt} tokens and {new} new ones",
        ("batch", *SIDES, "coordinated / serial"),
        rows,
    )
    report.data["end_to_end"] = [dict(zip(("batch", *SIDES, "ratio"), row, strict=True)) for row in rows]
    report.check("coordination_vs_serial", statistics.mean(ratios), E2E_TARGET, "lower", max(noises))


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
        rows.append((str(batch), *(us.get(name, "-") for name in ("serial", "streams", "partition", "fused")),
                     least_us, shares[-1]))  # fmt: skip
    columns = ("batch", "serial", "streams", "partition", "fused", "bytes / bandwidth", "share of bandwidth")
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
    return 2 * source.numel() / min(time_us(lambda: target.copy_(source), device) for _ in range(9))


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
        report.say("no GPU: the branches run one after the other, and only their prediction was measured")
    if report.options.plot:
        plot(report.data, report.options.plot)
    report.finish()


def plot(data: dict, path: Path) -> None:
    """Predicted over measured times of both branches; on a GPU also Fig. 11."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    panels = 3 if "end_to_end" in data else 2
    figure, axes = plt.subplots(1, panels, figsize=(3.6 * panels, 3.6))
    for axis, (name, points) in zip(axes, data["predictions"].items(), strict=False):
        measured, predicted = points["measured_us"], points["predicted_us"]
        low, high = 0.9 * min(measured), 1.1 * max(measured)
        axis.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], alpha=0.2, label="±5%")
        axis.loglog(measured, predicted, "o", markersize=3)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        error = next(e["median"] for e in data["errors"] if e["branch"] == name)
        axis.set(title=f"{name}: median error {error:.1%}", xlabel="measured µs", ylabel="predicted µs")
        axis.legend(frameon=False)
    if panels == 3:
        rows = data["end_to_end"]
        for side in SIDES:
            axes[2].plot([row["batch"] for row in rows], [row[side] for row in rows], "o-", label=side)
        axes[2].set(title="end to end", xlabel="batch size", ylabel="seconds", ylim=(0, None))
        axes[2].legend(frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
