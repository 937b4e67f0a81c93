"""The SwiGLU activation in Triton against the definition."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    check,
    far_rows,
    ints,
    launch_grids,
    randn,
    rows_of_projection,
    triton_module,
)

activation = triton_module("activation")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 8), (5, 80), (3, 1408), (2, 2056)])
def test_silu_mul(rows, width, dtype):
    check(activation.silu_mul, reference.silu_mul, randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_of_halves_of_a_projection(dtype):
    gate = rows_of_projection(7, 96, dtype=dtype, before=0, after=96)
    up = rows_of_projection(7, 96, dtype=dtype, before=96, after=0, seed=1)
    check(activation.silu_mul, reference.silu_mul, gate, up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200) is infinite, 1 / it is 0
def test_silu_mul_of_extreme_gates():
    gate = ints([[-1e4, -100.0, -88.8, -0.0, 0.0, 88.8, 100.0, 1e4]], torch.float32)
    check(activation.silu_mul, reference.silu_mul, gate, torch.ones(1, 8, device=DEVICE))


def test_offsets_past_32_bits():
    x = far_rows(3, 64)
    x[0] = x[2] = randn(64, dtype=x.dtype)
    y = activation.silu_mul(x, x)
    assert torch.equal(y[0], y[2]) and y[2].any()


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, activation)
    x = torch.empty(65536, 2048, device=DEVICE, dtype=torch.float16)
    activation.silu_mul(x, x)
    assert grids == [(65536,)]
