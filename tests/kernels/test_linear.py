"""Packed linears: the values of F.linear, rows of the same bits in every batch, and what cannot be packed."""

import pytest
import torch
import torch.nn.functional as F

from flexops.kernels import linear
from flexops.kernels.linear import PackedLinear, rows_are_exact, verify_row_exactness
from tests.kernels.helpers import assert_bound, bits, randn

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
PACKABLE = [p for p in DTYPES if PackedLinear(torch.zeros(16, 16, dtype=p.values[0])).packed]
SHAPES = [(192, 512), (512, 192), (512, 1536), (1536, 512), (512, 2192), (100, 30), (11008, 64)]


@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param(torch.float16, id="fp16")])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_values(rows, bias, dtype):
    x, weight = randn(rows, 96, dtype=dtype, seed=1), randn(40, 96, dtype=dtype, seed=2, scale=0.1)
    b = randn(40, dtype=dtype, seed=3) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    y = PackedLinear(weight, b)(x)
    assert y.shape == (rows, 40)
    assert_bound(y, F.linear(x, weight, b), exact)


def test_a_dtype_that_cannot_be_packed_and_a_transposed_weight():
    weight, x = randn(40, 64, dtype=torch.float64, seed=1), randn(3, 64, dtype=torch.float64, seed=2)
    layer = PackedLinear(weight)
    assert not layer.packed and torch.equal(layer(x), F.linear(x, weight))
    turned = randn(64, 40, seed=3).T
    assert torch.equal(PackedLinear(turned)(x.float()), PackedLinear(turned.contiguous())(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_one_input_are_joined(dtype):
    parts = [randn(n, 64, dtype=dtype, seed=n) for n in (48, 16, 16)]
    x = randn(5, 64, dtype=dtype, seed=1)
    joined = PackedLinear(parts)
    assert (joined.in_features, joined.out_features, joined.dtype) == (64, 80, dtype)
    assert torch.equal(joined(x), PackedLinear(torch.cat(parts))(x))


def test_strided_rows_no_rows_and_weights_that_require_grad():
    weight = torch.nn.Parameter(randn(40, 64, seed=1))
    layer = PackedLinear(weight, torch.nn.Parameter(randn(40, seed=2)))
    wide = randn(6, 200, seed=3)
    y = layer(wide[:, 50:114])
    assert not y.requires_grad
    assert torch.equal(y, layer(wide[:, 50:114].contiguous()))
    assert layer(wide[:0, :64]).shape == (0, 40)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_in_every_batch(shape, dtype):
    layer = PackedLinear(
        randn(shape[1], shape[0], dtype=dtype, seed=1, scale=0.05), randn(shape[1], dtype=dtype, seed=2)
    )
    assert verify_row_exactness(layer, rows=(*range(1, 18), 31, 32, 33, 64, 65, 100, 257))


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_change_no_bit(shape, dtype):
    layer = PackedLinear(randn(shape[1], shape[0], dtype=dtype, seed=1, scale=0.05))
    x, before = randn(20, shape[0], dtype=dtype, seed=2), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [layer(x), layer(x[:1])]
    torch.set_num_threads(before)
    for i in (2, 4):
        assert torch.equal(bits(results[0]), bits(results[i])) and torch.equal(bits(results[1]), bits(results[i + 1]))


@pytest.mark.parametrize("dtype", PACKABLE)
def test_the_startup_check_holds(dtype):
    assert rows_are_exact(dtype)


def test_the_check_sees_rows_that_differ():
    layer = PackedLinear(randn(16, 16, seed=1))
    apply = layer._apply
    layer._apply = lambda x: apply(x) * (1 + 1e-6 * (len(x) % 5 == 0))
    assert not verify_row_exactness(layer)


@pytest.mark.parametrize("missing", ["_pack_weight", "_packed_linear"])
def test_without_the_packed_operators_of_torch_it_is_a_plain_linear(missing, monkeypatch):
    monkeypatch.setattr(linear, missing, None)
    weight, x = randn(40, 64, seed=1), randn(3, 64, seed=2)
    layer = PackedLinear(weight)
    assert not layer.packed
    assert torch.equal(layer(x), F.linear(x, weight))
    weight[0] = 0
    assert layer(x)[:, 0].abs().max() == 0, "a single weight is used as it is, not copied"
