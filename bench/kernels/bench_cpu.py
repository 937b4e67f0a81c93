"""The CPU's own: packed linears against `F.linear`, and the decode step of one layer at several batch sizes.

Sizes are those of the model in bench/generate_vs_transformers.py. `gigabytes_per_second` counts the weights, the
states or the keys and values that a call must read (states: and write).
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import unfused
from conftest import CPU_SIZE

from flexops.kernels import cpu, cpu_linear
from flexops.kernels.linear import PackedLinear
from tests.kernels import inputs

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
SHAPES = [(512, 768), (512, 2192), (1024, 512), (512, 3072), (1536, 512), (512, 32000)]
LAYER = replace(
    CPU_SIZE,
    hidden=512,
    ffn=1536,
    q_heads=8,
    kv_heads=2,
    ssm_heads=16,
    ssm_head_dim=64,
    d_state=128,
    heads_per_page=1,
    page_gap=0,
)


@pytest.fixture(autouse=True)
def _cpu_only(gpu):
    if gpu:
        pytest.skip("a matter of the CPU")


def _bandwidth(benchmark, moved_bytes: int) -> None:
    benchmark.extra_info["gigabytes_per_second"] = moved_bytes / benchmark.stats.stats.median / 1e9


@pytest.mark.parametrize("side", ["own", "onednn", "F.linear"])
@pytest.mark.parametrize("rows", [1, 8, 32, 512])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_linear(benchmark, monkeypatch, shape, dtype, rows, side):
    benchmark.group = f"linear {shape} {str(dtype).removeprefix('torch.')} {rows} rows"
    weight = torch.randn(shape[1], shape[0]).to(dtype)
    x = torch.randn(rows, shape[0]).to(dtype)
    if side == "onednn":
        monkeypatch.setattr(cpu_linear, "supports", lambda weight: False)
    packed = PackedLinear(weight)
    if side not in ("F.linear", packed.form):
        pytest.skip(f"{dtype} is {packed.form} on this processor")
    benchmark((lambda: F.linear(x, weight)) if side == "F.linear" else lambda: packed(x))
    _bandwidth(benchmark, weight.nbytes)


@pytest.mark.parametrize("side", ["flexops", "torch"])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["state_update", "paged_attention_decode"])
def bench_decode(benchmark, case, dtype, batch, side):
    benchmark.group = f"{case} {str(dtype).removeprefix('torch.')} batch {batch}"
    requests = max(batch, 2)  # the inputs leave out one of them
    size = replace(LAYER, lengths=(1,) * requests, cached=(499,) * requests)
    arguments = list(inputs.arguments(case, size, dtype))
    if case == "state_update":
        moved_bytes = 2 * batch * LAYER.d_inner * LAYER.d_state * 4
        for cache, read, written in ((9, 10, 11), (12, 13, 14)):  # in place, as a decode step runs
            pages = torch.where(arguments[written] < 0, arguments[read], arguments[written])
            arguments[read] = arguments[written] = pages
            arguments[cache].normal_()
        per_request = (0, 1, 2, 8, 10, 11, 13, 14)
    else:
        moved_bytes = 2 * batch * 500 * LAYER.kv_heads * LAYER.head_dim * dtype.itemsize
        per_request, arguments[3] = (0, 2, 4), arguments[3][: batch + 1]
    arguments = [x[:batch] if i in per_request else x for i, x in enumerate(arguments)]
    operator = getattr(cpu if side == "flexops" else unfused, inputs.operator(case))
    with torch.inference_mode():
        benchmark(operator, *arguments)
    _bandwidth(benchmark, moved_bytes)
