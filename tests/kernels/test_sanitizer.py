"""`make sanitize` sees what it is there for: kernels with one fault each, of which none shows on most GPU runs."""

import pytest
import torch

from tests.kernels.helpers import DEVICE, SANITIZED

if not SANITIZED:
    pytest.skip("tests of the sanitizer, for `make sanitize`", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def store_kernel(out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, place.to(tl.float32))


@triton.jit
def load_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def count_kernel(out):
    tl.store(out, tl.load(out) + 1.0)


def test_a_store_past_the_end_is_reported():
    out = torch.zeros(100, device=DEVICE)
    # ttsem.sanitize runs as __main__, so the class of its faults cannot be imported
    with pytest.raises(Exception, match=r"writes 28 element.* past the end of the tensor passed as `out`"):
        store_kernel[(2,)](out, BLOCK=64)


def test_a_load_past_the_end_is_reported():
    x, out = torch.zeros(100, device=DEVICE), torch.zeros(1, device=DEVICE)
    with pytest.raises(Exception, match=r"reads 28 element.* past the end of the tensor passed as `x`"):
        load_kernel[(1,)](x, out, BLOCK=128)


def test_a_race_between_programs_is_reported():
    with pytest.raises(Exception, match=r"program instances .* both touch element 0 of `out`"):
        count_kernel[(2,)](torch.zeros(1, device=DEVICE))


def test_what_was_never_written_is_nan():
    out = torch.zeros(1, device=DEVICE)
    load_kernel[(1,)](torch.empty(128, device=DEVICE), out, BLOCK=128)
    assert out.isnan()
