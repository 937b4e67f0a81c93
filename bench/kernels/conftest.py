"""`pytest bench/kernels` on the CPU; `--gpu` takes GPU sizes and reports the share of measured copy bandwidth."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "bench")) if path not in sys.path]

from tests.kernels.inputs import Size  # noqa: E402  after the path

CPU_SIZE = Size(
    lengths=(200, 1, 37, 18),
    cached=(100, 0, 64, 256),
    hidden=768,
    ffn=2048,
    q_heads=12,
    kv_heads=4,
    head_dim=64,
    page_tokens=16,
    ssm_heads=24,
    ssm_head_dim=64,
    groups=1,
    d_state=64,
    chunk_size=16,
    heads_per_page=2,
)
GPU_PREFILL = replace(
    CPU_SIZE,
    lengths=(2048, 1, 1500, 4000, 512, 131),
    cached=(1024, 0, 64, 0, 4096, 64),
    hidden=4096,
    ffn=14336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    ssm_heads=128,
    groups=8,
    d_state=128,
    chunk_size=64,
    heads_per_page=1,
)
GPU_DECODE = replace(GPU_PREFILL, lengths=(64,) * 128, cached=(4032,) * 128)
DECODES = ("decode_branches", "finish_gated_norm", "paged_attention_decode", "state_update")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="GPU sizes on cuda:0, and %% of measured copy bandwidth")


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("python_functions", "bench_*")
    if not config.getoption("--gpu"):
        config.option.benchmark_max_time = 0.5


@pytest.fixture(scope="session")
def gpu(request) -> bool:
    asked = request.config.getoption("--gpu")
    if asked and not torch.cuda.is_available():
        pytest.skip("--gpu: no CUDA device")
    torch.backends.cudnn.allow_tf32 = False  # torch's fp32 convolution would not be fp32
    return asked


@pytest.fixture(scope="session")
def copy_bandwidth(gpu) -> float | None:
    """Bytes per second that a plain copy reads and writes on the GPU; None without one."""
    if not gpu:
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    best = float("inf")
    for _ in range(10):
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return 2 * source.numel() / best


@pytest.fixture
def size(gpu):
    """The size of a case."""

    def of(case: str) -> Size:
        if not gpu:
            return CPU_SIZE
        return GPU_DECODE if case in DECODES else GPU_PREFILL

    return of
