"""What one call of a small operator costs through the public face, the registered operator, and raw."""

import pytest
import torch

from flexops import kernels
from flexops.kernels import checks, reference
from flexops.kernels.dispatch import select

X, WEIGHT, EPS = torch.randn(2, 64), torch.ones(64), 1e-5
SIDES = {
    "reference, raw": reference.rms_norm,
    "raw": select(X.device).rms_norm,
    "registered": torch.ops.flexops.rms_norm,
    "public": kernels.rms_norm,
    "checks only": checks.rms_norm,
}


@pytest.mark.benchmark(group="call of rms_norm on [2, 64]")
@pytest.mark.parametrize("side", SIDES)
def bench_call(benchmark, side, gpu):
    if gpu:
        pytest.skip("a matter of the CPU")
    benchmark(SIDES[side], X, WEIGHT, EPS)
