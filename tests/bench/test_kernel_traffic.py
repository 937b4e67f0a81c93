"""The counting of bytes, on kernels whose traffic is known."""

import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("kernels are counted in the interpreter", allow_module_level=True)

import triton.language as tl  # noqa: E402  after the skip

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from kernel_traffic import PRIVATE_BYTES, SHARED_BYTES, counting  # noqa: E402  after the path


@triton.jit
def copy_kernel(x, out, n, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(TIMES):
        total += tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def scale_kernel(x, weight, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.program_id(0) * WIDTH
    tl.store(out + row + at, tl.load(x + row + at) * tl.load(weight + at))


@triton.jit
def strided_kernel(x, out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at * STRIDE))


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def aligned(n: int) -> torch.Tensor:
    """n floats at a multiple of 64 bytes, so that sectors can be counted by hand."""
    memory = torch.ones(n + 16)
    shift = -memory.data_ptr() % 64 // 4
    return memory[shift : shift + n]


def test_a_copy_moves_every_byte_once_and_masked_lanes_move_nothing():
    x, out = aligned(1000), aligned(1000)
    with counting() as traffic:
        copy_kernel[(4,)](x, out, 1000, TIMES=1, BLOCK=256)
    assert (traffic.loaded, traffic.stored, traffic.launches) == (4000, 4000, 1)
    assert traffic.requested == 8000
    assert torch.equal(out, x)


def test_a_near_second_read_is_free_and_a_far_one_is_not():
    near, far = PRIVATE_BYTES // 8, PRIVATE_BYTES // 2  # floats of one block: half and twice the cache's share
    for block, reads in ((near, 1), (far, 3)):
        x, out = aligned(block), aligned(block)
        with counting() as traffic:
            copy_kernel[(1,)](x, out, block, TIMES=3, BLOCK=triton.next_power_of_2(block))
        assert traffic.loaded == reads * 4 * block
        assert traffic.requested == 4 * 4 * block


def test_weights_that_all_programs_read_are_moved_once():
    x, weight, out = aligned(64 * 256), aligned(256), aligned(64 * 256)
    with counting() as traffic:
        scale_kernel[(64,)](x, weight, out, WIDTH=256)
    assert traffic.loaded == 4 * (64 * 256 + 256)
    assert SHARED_BYTES > 64 * 256 * 8


def test_every_launch_starts_with_a_cold_cache():
    x, out = aligned(256), aligned(256)
    with counting() as traffic:
        for _ in range(2):
            copy_kernel[(1,)](x, out, 256, TIMES=1, BLOCK=256)
    assert traffic.loaded == 2 * 1024 and traffic.launches == 2


def test_scattered_loads_move_whole_sectors():
    x, out = aligned(64 * 16), aligned(64)
    with counting() as traffic:
        strided_kernel[(1,)](x, out, STRIDE=16, BLOCK=64)
    assert traffic.loaded == 64 * 32 and traffic.stored == 64 * 4
