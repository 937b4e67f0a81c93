"""Measure flash-attn and mamba-ssm against our prefill kernels on this GPU, and write the table that chooses.

One row per shape of a call: the model's sizes, and the counts of tokens and of the longest prompt in powers of two.
The runtime reads the table with `flexops.kernels.providers.ProviderTable.load`. Needs CUDA; a package that is not
installed has no times, so ours runs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Report, arguments, interleave

from flexops.kernels import providers
from flexops.kernels.dispatch import select
from flexops.kernels.providers import FLASH_ATTENTION, MAMBA_SSM, OURS, CallShape, ProviderTable
from tests.kernels import inputs

MODEL = replace(
    inputs.TINY,
    hidden=4096,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    ssm_heads=128,
    ssm_head_dim=64,
    groups=8,
    d_state=128,
    chunk_size=64,
    heads_per_page=1,
)
CALLS = 20


def time_us(call: Callable[[], Any]) -> float:
    """Median microseconds of one call, the device waited for after every 20."""

    def several() -> None:
        for _ in range(CALLS):
            call()

    return interleave({"it": several}, rounds=10).median("it") / CALLS * 1e6


def _attention(table: ProviderTable, requests: int, length: int) -> str:
    size = replace(MODEL, lengths=(length,) * requests, cached=(0,) * requests)
    device, dtype = torch.device("cuda"), torch.bfloat16
    call = inputs.arguments("paged_attention", size, dtype, device)
    q, cu_seqlens, scale = call[0], call[3], call[5]
    k, v = (torch.randn(len(q), size.kv_heads, size.head_dim, dtype=dtype, device=device) for _ in range(2))
    sides: dict[str, Callable[[], Any]] = {OURS: partial(select(device).paged_attention, *call)}
    flash = providers.flash_attention()
    if flash is not None:
        packed = (q, k, v, cu_seqlens, scale, length)
        sides[FLASH_ATTENTION] = partial(providers.run_flash_attention, flash, *packed)
    shape = CallShape("prefill_attention", dtype, (size.q_heads, size.head_dim, size.kv_heads), len(q), length)
    table.measure(shape, sides, time_us)
    return shape.key


def _scan(table: ProviderTable, requests: int, length: int) -> str:
    size = replace(MODEL, lengths=(length,) * requests, cached=(0,) * requests)
    device, dtype = torch.device("cuda"), torch.bfloat16
    call = inputs.arguments("ssd_scan", size, dtype, device)
    weights, bounds, cache, final_pages = call[:7], call[7:10], call[10], call[12]
    ours = partial(select(device).ssd_scan, *weights, *bounds, cache, None, final_pages)
    sides: dict[str, Callable[[], Any]] = {OURS: ours}
    scan = providers.mamba_scan()
    if scan is not None:
        batch = (*weights, requests, size.chunk_size, cache, final_pages)
        sides[MAMBA_SSM] = partial(providers.run_mamba_scan, scan, *batch)
    dims = (size.ssm_heads, size.ssm_head_dim, size.groups, size.d_state, size.chunk_size)
    shape = CallShape("prefill_scan", dtype, dims, requests * length, length)
    table.measure(shape, sides, time_us)
    return shape.key


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/providers_<device>.json")
    report = Report("providers", parser)
    if not torch.cuda.is_available():
        report.say("no CUDA device: there is nothing to choose between, ours runs")
        report.finish()
    device = torch.cuda.get_device_name()
    table = ProviderTable(device)
    lengths = (128, 1024) if report.options.quick else (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    rows = []
    for measure in (_attention, _scan):
        for requests in (1, 4) if report.options.quick else (1, 2, 4, 8, 16):
            for length in lengths:
                if requests * length <= 32768:
                    key = measure(table, requests, length)
                    times = table.times_us[key]
                    rows.append((key, *(times.get(name, float("nan")) for name in (OURS, FLASH_ATTENTION, MAMBA_SSM))))
    out = report.options.out or ROOT / "bench" / "results" / f"providers_{device.replace(' ', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    table.save(out)
    report.data["times_us"] = table.times_us
    report.table(f"microseconds on {device}", ("call", OURS, FLASH_ATTENTION, MAMBA_SSM), rows)
    report.finish()


if __name__ == "__main__":
    main()
