"""The kernels on a device: values, no hidden waiting, CUDA graphs, compilation. Skipped where there is no GPU.

The files of tests/kernels run on the device too, where there is one.
"""

from dataclasses import replace

import pytest
import torch

from flexops import kernels
from flexops.kernels import providers, reference
from flexops.kernels.providers import FLASH_ATTENTION, MAMBA_SSM, CallShape, Providers, ProviderTable
from tests.kernels import inputs
from tests.kernels.helpers import DTYPES, check, cu_seqlens, ints, randn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
MIDDLE = replace(
    inputs.TINY,
    lengths=(65, 1, 130),
    cached=(63, 0, 600),
    hidden=2048,
    ffn=2816,
    q_heads=16,
    kv_heads=2,
    head_dim=128,
    ssm_heads=16,
    ssm_head_dim=64,
    d_state=128,
    chunk_size=64,
)
SIZES = {
    "tiny": inputs.TINY,
    "middle": MIDDLE,
    "odd": replace(MIDDLE, head_dim=80, ssm_head_dim=40, d_state=96, d_conv=3),
}


@pytest.fixture(params=inputs.CASES)
def case(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values(case, size, dtype):
    name = inputs.operator(case)
    arguments = inputs.arguments(case, SIZES[size], dtype, CUDA)
    check(getattr(kernels, name), getattr(reference, name), *arguments, mutated=inputs.mutated(case))


def test_no_operator_waits_for_the_device(case):
    arguments = inputs.arguments(case, MIDDLE, torch.bfloat16, CUDA)
    operator = getattr(kernels, inputs.operator(case))
    operator(*arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_debug_mode_checks_indices(monkeypatch):
    x, index = torch.ones(4, 16, device=CUDA), torch.tensor([4], dtype=torch.int32, device=CUDA)
    monkeypatch.setenv("FLEXOPS_DEBUG", "1")
    with pytest.raises(ValueError, match="index: holds 4; allowed: -1 to 3"):
        kernels.gather_rows(x, index)
    with pytest.raises(ValueError, match="index: holds 1 twice"):
        kernels.scatter_rows(x, x[:2], torch.ones(2, dtype=torch.int32, device=CUDA))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_is_not_current(case):
    """Outside of torch.cuda.device, tensors on the second GPU give what they give on the first."""
    operator, results = getattr(kernels, inputs.operator(case)), []
    for index in range(2):
        arguments = inputs.arguments(case, inputs.TINY, torch.float32, torch.device("cuda", index))
        result = operator(*arguments)
        results.append((result, [arguments[i] for i in inputs.mutated(case)]))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True, check_device=False)


def test_cuda_graph_replays_what_a_call_does(case):
    called, captured = (inputs.arguments(case, MIDDLE, torch.bfloat16, CUDA) for _ in range(2))
    operator = getattr(kernels, inputs.operator(case))
    warm = inputs.arguments(case, MIDDLE, torch.bfloat16, CUDA)
    operator(*warm)
    expected = operator(*called)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operator(*captured)
    graph.replay()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    for i in inputs.mutated(case):
        torch.testing.assert_close(captured[i], called[i], rtol=0, atol=0, equal_nan=True)


def test_same_bits_every_time(case):
    runs = []
    for _ in range(3):
        arguments = inputs.arguments(case, MIDDLE, torch.bfloat16, CUDA)
        result = getattr(kernels, inputs.operator(case))(*arguments)
        runs.append((result, [arguments[i] for i in inputs.mutated(case)]))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=0, equal_nan=True)


def test_torch_compile_in_one_graph(case):
    torch._dynamo.reset()
    eager, compiled = (inputs.arguments(case, inputs.TINY, torch.float32, CUDA) for _ in range(2))
    operator = getattr(kernels, inputs.operator(case))
    expected, result = operator(*eager), torch.compile(operator, fullgraph=True)(*compiled)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for i in inputs.mutated(case):
        torch.testing.assert_close(compiled[i], eager[i], rtol=0, atol=0, equal_nan=True)


def test_flash_attention_agrees():
    if providers.flash_attention() is None:
        pytest.skip("flash-attn is not installed")
    lengths = (300, 1, 77)
    q, k, v = (randn(sum(lengths), heads, 64, dtype=torch.bfloat16, seed=i) for i, heads in enumerate((8, 2, 2)))
    table = ProviderTable("this one")
    table.times_us[CallShape("prefill_attention", q.dtype, (8, 64, 2), len(q), 300).key] = {FLASH_ATTENTION: 1.0}
    chosen = Providers(table, CUDA, deterministic=False)
    result = chosen.prefill_attention(q, k, v, cu_seqlens(lengths), 0.125, 300)
    expected = kernels.varlen_attention(q.float(), k.float(), v.float(), cu_seqlens(lengths), 0.125)
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


def test_mamba_scan_agrees():
    if providers.mamba_scan() is None:
        pytest.skip("mamba-ssm is not installed")
    x, dt = randn(256, 4, 64, dtype=torch.bfloat16), randn(256, 4, dtype=torch.bfloat16, seed=1)
    B, C = (randn(256, 1, 64, dtype=torch.bfloat16, seed=s) for s in (2, 3))
    weights = randn(4, seed=4), B, C, randn(4, seed=5), randn(4, seed=6) - 3
    ours, theirs = (torch.zeros(4, 2, 64, 64, device=CUDA) for _ in range(2))
    pages = ints([[2, 0], [1, 3]])
    table = ProviderTable("this one")
    table.times_us[CallShape("prefill_scan", x.dtype, (4, 64, 1, 64, 64), 256, 128).key] = {MAMBA_SSM: 1.0}
    chosen = Providers(table, CUDA, deterministic=False)
    result = chosen.prefill_scan(x, dt, *weights, [128, 128], 64, theirs, pages)
    bounds = cu_seqlens([128, 128]), ints([0, 0])
    expected = kernels.ssd_scan(x, dt, *weights, *bounds, 64, ours, None, pages)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(theirs, ours, rtol=1e-2, atol=1e-2)
