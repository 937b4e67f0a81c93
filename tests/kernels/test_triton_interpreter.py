"""The repaired interpreter shows what a GPU would do: rounding of bfloat16, undefined lanes, bad addresses."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not in the interpreter")


@triton.jit
def _sum_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.bfloat16)
    for i in range(count):
        total += tl.load(x_ptr + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count))


@triton.jit
def _dot_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x).to(tl.bfloat16))


def test_bfloat16_sums_round_to_nearest_even():
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(16, dtype=torch.bfloat16)
    _sum_kernel[(1,)](x, out, 5, BLOCK=16)
    expected = torch.zeros(16, dtype=torch.bfloat16)
    for row in x:
        expected += row
    assert torch.equal(out, expected)


def test_bfloat16_dot_sums_in_fp32():
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty_like(x)
    _dot_kernel[(1,)](x, out, BLOCK=16)
    assert torch.equal(out, (x.float() @ x.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masked_lanes_without_other_are_undefined(dtype):
    out = torch.zeros(16, dtype=dtype)
    _copy_kernel[(1,)](torch.ones(16, dtype=dtype), out, 10, BLOCK=16)
    assert out[:10].eq(1).all() and out[10:].isnan().all()


@pytest.mark.parametrize("short", ["x", "out"])
def test_addresses_outside_of_the_tensors_are_refused(short):
    sizes = {"x": 16, "out": 16, short: 15}
    with pytest.raises(Exception, match="1 of 16 lanes lie outside"):
        _copy_kernel[(1,)](torch.ones(sizes["x"]), torch.ones(sizes["out"]), 16, BLOCK=16)
