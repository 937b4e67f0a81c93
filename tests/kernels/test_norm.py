"""RMS norms in Triton against the definition."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    bits,
    check,
    far_rows,
    ints,
    launch_grids,
    randn,
    rows_of_projection,
    triton_module,
)

norm = triton_module("norm")
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 80, 1024, 1536])
def test_rms_norm(width, dtype):
    check(norm.rms_norm, reference.rms_norm, randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=1), EPS)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_rms_norm_rows(rows):
    check(norm.rms_norm, reference.rms_norm, randn(rows, 64), randn(64, seed=1), EPS)


@pytest.mark.parametrize("shape", [(64,), (3, 4, 64), (2, 3, 4, 64)])
def test_rms_norm_leading_dims(shape):
    check(norm.rms_norm, reference.rms_norm, randn(*shape), randn(64, seed=1), EPS)


def test_rms_norm_of_heads_in_a_projection():
    q = rows_of_projection(3, 4, 96, dtype=torch.bfloat16)
    check(norm.rms_norm, reference.rms_norm, q, randn(96, seed=1), EPS)


def test_rms_norm_wide_row():
    check(norm.rms_norm, reference.rms_norm, randn(2, 16384), randn(16384, seed=1), EPS)


def test_rms_norm_of_a_large_and_a_zero_row():
    x = torch.stack([randn(64) * 1e4, torch.zeros(64, device=DEVICE), randn(64, seed=1) * 1e-4])
    check(norm.rms_norm, reference.rms_norm, x, torch.ones(64, device=DEVICE), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_groups", [1, 2, 8])
@pytest.mark.parametrize("has_gate", [True, False])
def test_gated_rms_norm(has_gate, n_groups, dtype):
    x = rows_of_projection(3, 640, dtype=dtype)
    gate = rows_of_projection(3, 640, dtype=dtype, seed=1, before=16) if has_gate else None
    check(norm.gated_rms_norm, reference.gated_rms_norm, x, gate, randn(640, seed=2), EPS, n_groups)


def test_gated_rms_norm_keeps_groups_apart():
    x = torch.cat([randn(2, 32), 100 * randn(2, 32, seed=1)], dim=1)
    y, _ = check(norm.gated_rms_norm, reference.gated_rms_norm, x, None, torch.ones(64, device=DEVICE), EPS, 2)
    assert torch.allclose(y.unflatten(1, (2, 32)).square().mean(-1), torch.ones(2, 2, device=DEVICE), atol=1e-3)


@pytest.mark.parametrize("n_groups", [1, 4])
def test_the_definition_of_the_gated_norm_agrees_with_transformers(n_groups):
    """Independent oracle: the output norm of transformers' Mamba-2."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, gate, weight = randn(3, 64), randn(3, 64, seed=1), randn(64, seed=2)
    theirs = mamba2.MambaRMSNormGated(64, 64 // n_groups, EPS).to(DEVICE)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(reference.gated_rms_norm(x, gate, weight, EPS, n_groups), theirs(x, gate).detach())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200) is infinite, 1 / it is 0
def test_gated_rms_norm_of_extreme_gates():
    gate = ints([[-200, -50, 0, 200] * 4]).float()
    check(norm.gated_rms_norm, reference.gated_rms_norm, randn(1, 16), gate, torch.ones(16, device=DEVICE), EPS, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "n_groups"), [(4, 64, 1), (6, 80, 2), (8, 16, 8), (48, 64, 1)])
def test_finish_gated_norm(heads, head_dim, n_groups, dtype):
    x = rows_of_projection(3, heads * head_dim, dtype=dtype)
    sums = x.float().unflatten(1, (heads, head_dim)).square().sum(-1)
    weight = randn(heads * head_dim, dtype=dtype, seed=1)
    y, _ = check(norm.finish_gated_norm, reference.finish_gated_norm, x, sums, weight, EPS, n_groups)
    whole = norm.gated_rms_norm(x, None, weight, EPS, n_groups)
    assert torch.allclose(y.float(), whole.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_finish_gated_norm_without_rows():
    check(norm.finish_gated_norm, reference.finish_gated_norm, randn(0, 64), randn(0, 4), randn(64), EPS, 1)


def test_a_row_does_not_depend_on_the_others():
    x, weight = randn(9, 64, dtype=torch.bfloat16), randn(64, seed=1)
    whole = norm.rms_norm(x, weight, EPS)
    for i in (0, 4, 8):
        assert torch.equal(bits(norm.rms_norm(x[i : i + 1], weight, EPS)), bits(whole[i : i + 1]))


def test_offsets_past_32_bits():
    x, weight = far_rows(3, 64), torch.ones(64, device=DEVICE)
    x[0] = x[2] = randn(64, dtype=x.dtype)
    results = [
        norm.rms_norm(x, weight, EPS),
        norm.gated_rms_norm(x, x, weight, EPS, 2),
        norm.finish_gated_norm(x, torch.ones(3, 4, device=DEVICE), weight, EPS, 2),
    ]
    for y in results:
        assert torch.equal(y[0], y[2]) and y[2].any()


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, norm)
    x = torch.empty(65536, 1024, device=DEVICE)
    norm.rms_norm(x, x[0], EPS)
    norm.gated_rms_norm(x, x, x[0], EPS, 1)
    norm.finish_gated_norm(x, x[:, :4], x[0], EPS, 1)
    assert grids == [(65536,)] * 3
