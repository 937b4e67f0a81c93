"""The prefill gate in Triton against the definition."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    bits,
    check,
    cu_seqlens,
    far_rows,
    ints,
    launch_grids,
    randn,
    rows_of_projection,
    triton_module,
)

gate_pool = triton_module("gate_pool")
EPS = 1e-5


def pool(rows=5, width=64, gate_dim=16, dtype=torch.float32, w1_dtype=None, has_delta=True):
    residual = rows_of_projection(rows, width, dtype=dtype)
    delta = rows_of_projection(rows, width, dtype=dtype, seed=1, before=16) if has_delta else None
    w1 = randn(gate_dim, width, dtype=w1_dtype or dtype, seed=3, scale=width**-0.5)
    args = (residual, delta, randn(width, dtype=dtype, seed=2), EPS, w1)
    return check(gate_pool.gate_pool, reference.gate_pool, *args, mutated=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [True, False])
def test_gate_pool(has_delta, dtype):
    pool(dtype=dtype, has_delta=has_delta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": 1},
        {"rows": 16},
        {"rows": 33},
        {"width": 8},
        {"width": 80},
        {"width": 768},
        {"gate_dim": 1},
        {"gate_dim": 8},
        {"gate_dim": 24},
        {"w1_dtype": torch.float32},
    ],
    ids=str,
)
def test_gate_pool_varied(change, dtype):
    pool(dtype=dtype, **change)


def test_a_row_does_not_depend_on_the_others():
    x, weight, w1 = randn(21, 64), randn(64, seed=1), randn(16, 64, seed=2)
    u, z = gate_pool.gate_pool(x, None, weight, EPS, w1)
    for i in (0, 15, 16, 20):
        ui, zi = gate_pool.gate_pool(x[i : i + 1], None, weight, EPS, w1)
        assert torch.equal(bits(ui), bits(u[i : i + 1]))
        assert torch.equal(bits(zi), bits(z[i : i + 1]))


def route_args(lengths, gate_dim=16, bias=None, dtype=torch.float32):
    z = randn(sum(lengths), gate_dim)
    b1, w2, b2 = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(gate_dim,), (2, gate_dim), (2,)]))
    return z, cu_seqlens(lengths), b1, w2, b2, bias


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [5, 1, 128, 700], [1100], []], ids=str)
def test_gate_route(lengths):
    check(gate_pool.gate_route, reference.gate_route, *route_args(lengths))


@pytest.mark.parametrize("gate_dim", [1, 8, 24])
def test_gate_route_gate_dim(gate_dim):
    check(gate_pool.gate_route, reference.gate_route, *route_args([5, 9], gate_dim))


def test_gate_route_of_bf16_weights():
    check(gate_pool.gate_route, reference.gate_route, *route_args([5, 9], dtype=torch.bfloat16))


def test_gate_route_of_rows_in_a_wider_matrix():
    args = (rows_of_projection(9, 16), *route_args([5, 4])[1:])
    check(gate_pool.gate_route, reference.gate_route, *args)


def test_gate_route_bias_turns_the_choice():
    args = route_args([5, 5, 5], bias=ints([100, 0, -100]).float())
    (probs, route), _ = check(gate_pool.gate_route, reference.gate_route, *args)
    assert route[0] == reference.ATTENTION and route[2] == reference.SSM
    assert torch.allclose(probs.sum(-1), torch.ones(3, device=DEVICE))


def test_gate_route_tie_goes_to_ssm():
    z, cu, b1, w2, b2, _ = route_args([5])
    probs, route = gate_pool.gate_route(z, cu, b1, w2[:1].repeat(2, 1), b2[:1].repeat(2), None)
    assert route.tolist() == [reference.SSM] and probs.tolist() == [[0.5, 0.5]]


def test_gate_route_gives_the_same_bits_anywhere_in_a_batch():
    lengths = [70, 1, 200, 64]
    z, cu, *gate = route_args(lengths)
    probs, _ = gate_pool.gate_route(z, cu, *gate)
    for r, length in enumerate(lengths):
        alone, _ = gate_pool.gate_route(z[cu[r] : cu[r + 1]], cu_seqlens([length]), *gate)
        assert torch.equal(bits(alone), bits(probs[r : r + 1]))


def test_offsets_past_32_bits():
    x = far_rows(3, 64)
    x[0] = x[2] = randn(64, dtype=x.dtype)
    u, z = gate_pool.gate_pool(x, x, torch.ones(64, device=DEVICE), EPS, randn(16, 64, dtype=x.dtype, seed=1))
    assert torch.equal(x[0], x[2]) and torch.equal(u[0], u[2]) and torch.equal(z[0], z[2]) and z[2].any()


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, gate_pool)
    x = torch.empty(65536 * 16, 16, device=DEVICE)
    gate_pool.gate_pool(x, None, x[0], EPS, x[:16])
    gate_pool.gate_route(x, ints(range(65537)), x[0], x[:2], x[0, :2], None)
    assert grids == [(65536,)] * 2
