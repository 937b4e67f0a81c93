"""Packed linears: the values of F.linear, rows of the same bits in every batch, and what cannot be packed."""

import os
import subprocess
import sys
from collections.abc import Callable

import numba
import pytest
import torch
import torch.nn.functional as F

from flexops.kernels import cpu_linear, linear
from flexops.kernels.linear import PackedLinear, rows_are_exact, verify_row_exactness
from tests.kernels.helpers import assert_bound, bits, randn

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
FORMS = ["own", "onednn", "plain"]
SHAPES = [(192, 512), (512, 192), (512, 1536), (1536, 512), (512, 2192), (100, 30), (11008, 64)]

Pack = Callable[..., PackedLinear]


@pytest.fixture
def pack(form, monkeypatch) -> Pack:
    """PackedLinear in the wanted form; skips where this processor lacks it for the dtype."""
    if form != "own":
        monkeypatch.setattr(cpu_linear, "supports", lambda weight: False)
    if form == "plain":
        monkeypatch.setattr(linear, "_onednn", lambda weight: None)

    def make(weights, bias=None):
        layer = PackedLinear(weights, bias)
        if layer.form != form:
            pytest.skip(f"{layer.dtype} is {layer.form} on this processor")
        return layer

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param(torch.float16, id="fp16")])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_values(pack, rows, bias, dtype):
    x, weight = randn(rows, 96, dtype=dtype, seed=1), randn(40, 96, dtype=dtype, seed=2, scale=0.1)
    b = randn(40, dtype=dtype, seed=3) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    y = pack(weight, b)(x)
    assert y.shape == (rows, 40)
    assert_bound(y, F.linear(x, weight, b), exact)


def test_a_dtype_that_cannot_be_packed_and_a_transposed_weight():
    weight, x = randn(40, 64, dtype=torch.float64, seed=1), randn(3, 64, dtype=torch.float64, seed=2)
    layer = PackedLinear(weight)
    assert layer.form == "plain" and torch.equal(layer(x), F.linear(x, weight))
    turned = randn(64, 40, seed=3).T
    assert torch.equal(PackedLinear(turned)(x.float()), PackedLinear(turned.contiguous())(x.float()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_one_input_are_joined(pack, dtype):
    parts = [randn(n, 64, dtype=dtype, seed=n) for n in (48, 16, 16)]
    x = randn(5, 64, dtype=dtype, seed=1)
    joined = pack(parts)
    assert (joined.in_features, joined.out_features, joined.dtype) == (64, 80, dtype)
    assert torch.equal(joined(x), pack(torch.cat(parts))(x))


@pytest.mark.parametrize("form", FORMS)
def test_strided_rows_no_rows_and_weights_that_require_grad(pack):
    weight = torch.nn.Parameter(randn(40, 64, seed=1))
    layer = pack(weight, torch.nn.Parameter(randn(40, seed=2)))
    wide = randn(6, 200, seed=3)
    y = layer(wide[:, 50:114])
    assert not y.requires_grad
    assert torch.equal(y, layer(wide[:, 50:114].contiguous()))
    assert layer(wide[:0, :64]).shape == (0, 40)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_in_every_batch(pack, shape, dtype):
    layer = pack(randn(shape[1], shape[0], dtype=dtype, seed=1, scale=0.05), randn(shape[1], dtype=dtype, seed=2))
    assert verify_row_exactness(layer, rows=(*range(1, 18), 31, 32, 33, 64, 65, 100, 257))


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_change_no_bit(pack, shape, dtype):
    layer = pack(randn(shape[1], shape[0], dtype=dtype, seed=1, scale=0.05))
    x, before = randn(20, shape[0], dtype=dtype, seed=2), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [layer(x), layer(x[:1])]
    torch.set_num_threads(before)
    for i in (2, 4):
        assert torch.equal(bits(results[0]), bits(results[i])) and torch.equal(bits(results[1]), bits(results[i + 1]))


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_startup_check_holds(pack, dtype):
    pack(torch.zeros(16, 16, dtype=dtype))
    assert rows_are_exact(dtype)


def test_the_check_sees_rows_that_differ():
    class Differs(PackedLinear):
        def __call__(self, x):
            return super().__call__(x) * (1 + 1e-6 * (len(x) % 5 == 0))

    assert not verify_row_exactness(Differs(randn(16, 16, seed=1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_own_products_are_at_least_as_exact_as_torch(dtype):
    """Long sums: chains of 128 steps gather less error than one chain would."""
    weight, x = randn(70, 11008, dtype=dtype, seed=1), randn(9, 11008, dtype=dtype, seed=2)
    layer = PackedLinear(weight)
    if layer.form != "own":
        pytest.skip(f"{dtype} is {layer.form} on this processor")
    exact = x.double() @ weight.double().T
    error, theirs = ((y.double() - exact).abs().max().item() for y in (layer(x), F.linear(x, weight)))
    assert error <= theirs


@pytest.mark.parametrize(
    ("dtype", "inputs", "features", "expected"),
    [
        (torch.float32, 63, {"avx512f": True}, True),
        (torch.float32, 64, {"avx2": True, "avx512f": False}, False),
        (torch.float32, 64, {}, False),
        (torch.bfloat16, 64, {"avx512f": True}, False),
        (torch.bfloat16, 64, {"avx512f": True, "avx512bf16": True}, True),
        (torch.bfloat16, 63, {"avx512f": True, "avx512bf16": True}, False),
        (torch.bfloat16, 64, {"avx512f": True, "avx512bf16": True, "amx-bf16": True}, False),
        (torch.float16, 64, {"avx512f": True, "avx512bf16": True}, False),
    ],
)
def test_where_own_products_run(monkeypatch, dtype, inputs, features, expected):
    monkeypatch.setattr(cpu_linear, "_features", lambda: features)
    assert cpu_linear.supports(torch.zeros(8, inputs, dtype=dtype)) is expected


@pytest.mark.parametrize("missing", ["_pack_weight", "_packed_linear"])
def test_without_the_packed_operators_of_torch_it_is_a_plain_linear(missing, monkeypatch):
    monkeypatch.setattr(cpu_linear, "supports", lambda weight: False)
    monkeypatch.setattr(linear, missing, None)
    weight, x = randn(40, 64, seed=1), randn(3, 64, seed=2)
    layer = PackedLinear(weight)
    assert layer.form == "plain"
    assert torch.equal(layer(x), F.linear(x, weight))
    weight[0] = 0
    assert layer(x)[:, 0].abs().max() == 0, "a single weight is used as it is, not copied"


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(pack):
    layer = pack(randn(40, 64, seed=1))
    for x in (randn(3, 63), randn(64), randn(2, 3, 64), randn(3, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"x is torch\..* it must be torch.float32, \[rows, 64\]"):
            layer(x)
    with pytest.raises(ValueError, match=r"bias has shape \(39,\); it must be \(40,\)"):
        pack(randn(40, 64, seed=1), randn(39))


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_lie_apart_and_a_bias_of_another_dtype(pack):
    weight, bias = randn(40, 64, dtype=torch.bfloat16, seed=1), randn(80, seed=2)[::2]
    layer, x = pack(weight, bias), randn(64, 3, dtype=torch.bfloat16, seed=3).T
    exact = F.linear(x.double(), weight.double(), bias.bfloat16().double())
    assert_bound(layer(x), F.linear(x, weight, bias.bfloat16()), exact)


def test_compiled_products_are_found_on_disk(tmp_path):
    """A second process compiles nothing."""
    if not cpu_linear.supports(torch.zeros(2, 2)):
        pytest.skip("oneDNN computes the products on this processor")
    script = (
        "import torch; from flexops.kernels import cpu_linear as c\n"
        "w = torch.ones(8, 8); c.linear(w, c.pack(w), 8)\n"
        "print(c._fp32_product._compiled.cache_hits)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [int(run.stdout) for run in hits] == [0, 1]


def test_no_own_products_where_numba_compiles_for_another_processor(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    cpu_linear._features.cache_clear()
    try:
        assert not cpu_linear.supports(torch.zeros(8, 8))
    finally:
        cpu_linear._features.cache_clear()
