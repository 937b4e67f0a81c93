"""Split, merge and row copies in Triton against the definition."""

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

split_merge = triton_module("split_merge")
EPS = 1e-5
T = 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 80, 1536])
def test_gather_rows(width, dtype):
    x = rows_of_projection(T, width, dtype=dtype)
    check(split_merge.gather_rows, reference.gather_rows, x, ints([3, -1, 5, 0, 3]))


def test_gather_rows_wider_than_a_block():
    check(split_merge.gather_rows, reference.gather_rows, randn(3, 4104), ints([2, -1, 0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gather_rows_of_no_rows(dtype):
    """Where there is no row to name, -1 is all an index can hold."""
    check(split_merge.gather_rows, reference.gather_rows, randn(0, 64), ints([-1, -1], dtype))


@pytest.mark.parametrize("index", [[], [-1], [-1, -1, -1], [6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gather_rows_index(index, dtype):
    check(split_merge.gather_rows, reference.gather_rows, randn(T, 64), ints(index, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 80, 1536])
def test_scatter_rows(width, dtype):
    out, x = rows_of_projection(T, width, dtype=dtype), rows_of_projection(3, width, dtype=dtype, seed=1)
    result, args = check(split_merge.scatter_rows, reference.scatter_rows, out, x, ints([3, -1, 6]), mutated=(0,))
    assert result is args[0]


@pytest.mark.parametrize("index", [[], [-1, -1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_scatter_rows_index(index, dtype):
    out, x = randn(T, 64), randn(len(index), 64, seed=1)
    check(split_merge.scatter_rows, reference.scatter_rows, out, x, ints(index, dtype), mutated=(0,))


def split(width=64, dtype=torch.float32, has_delta=True, order=(3, -1, 5, 0)):
    residual = rows_of_projection(T, width, dtype=dtype)
    delta = rows_of_projection(T, width, dtype=dtype, seed=1, before=16) if has_delta else None
    args = (residual, delta, randn(width, dtype=dtype, seed=2), EPS, ints(order))
    return check(split_merge.split_norm, reference.split_norm, *args, mutated=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("width", [8, 80, 1536])
def test_split_norm(width, has_delta, dtype):
    split(width, dtype, has_delta)


@pytest.mark.parametrize("order", [[], [-1, -1], [6, 5, 4, 3, 2, 1, 0], [0]], ids=str)
def test_split_norm_order(order):
    split(order=order)


def test_split_norm_of_row_minus_one_is_zero_whatever_memory_holds():
    residual = torch.full((2, 64), float("nan"), device=DEVICE)
    u = split_merge.split_norm(residual, None, torch.ones(64, device=DEVICE), EPS, ints([-1]))
    assert torch.equal(u, torch.zeros(1, 64, device=DEVICE))


def merge(width=64, dtype=torch.float32, attention_rows=3, ssm_rows=3, inverse=(5, -1, 0, 1, 3, 2, 4)):
    args = (
        rows_of_projection(len(inverse), width, dtype=dtype),
        rows_of_projection(attention_rows, width, dtype=dtype, seed=1),
        rows_of_projection(ssm_rows, width, dtype=dtype, seed=2, before=16),
        ints(inverse),
        randn(width, dtype=dtype, seed=3),
        EPS,
    )
    return check(split_merge.merge_norm, reference.merge_norm, *args, mutated=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 80, 1536])
def test_merge_norm(width, dtype):
    merge(width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("attention_rows", "ssm_rows", "inverse"),
    [(7, 0, range(7)), (0, 7, range(7)), (1, 1, [1, 0]), (1, 1, []), (0, 0, [-1, -1])],
    ids=["attention only", "ssm only", "one each", "no rows", "no branch rows"],
)
def test_merge_norm_routes(attention_rows, ssm_rows, inverse, dtype):
    merge(dtype=dtype, attention_rows=attention_rows, ssm_rows=ssm_rows, inverse=inverse)


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, split_merge)
    x, index = torch.empty(65536, 1024, device=DEVICE), ints(range(65536))
    split_merge.gather_rows(x, index)
    split_merge.scatter_rows(x, x, index)
    split_merge.split_norm(x, None, x[0], EPS, index)
    split_merge.merge_norm(x, x, x, index, x[0], EPS)
    assert grids == [(65536,)] * 4


def test_offsets_past_32_bits():
    """A row 2^31 elements away gives and takes the same bytes as a near one."""
    x, order, weight = far_rows(3, 64), ints([0, 2]), randn(64, seed=1)
    value = randn(64, dtype=x.dtype)
    x[0], x[2] = value, value
    near, far = split_merge.gather_rows(x, order)
    assert torch.equal(near, value) and torch.equal(far, value)
    near, far = split_merge.split_norm(x, x, weight, EPS, order)
    assert torch.equal(near, far) and torch.equal(x[2], value + value)
    near, far = split_merge.merge_norm(x, x[:2], x[2:], ints([0, -1, 2]), weight, EPS)[::2]
    assert torch.equal(near, far) and torch.equal(x[2], 4 * value)
    split_merge.scatter_rows(x, torch.stack([value, value]), order)
    assert torch.equal(x[0], value) and torch.equal(x[2], value)
