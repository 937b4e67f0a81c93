"""Results in memory of the caller: the bits of a call without it, what is refused, and what padding rows yield."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexops import kernels
from flexops.kernels import reference
from flexops.kernels.dispatch import select
from flexops.kernels.library import TAKES_OUT
from flexops.kernels.linear import PackedLinear
from flexops.kernels.results import results
from tests.kernels import inputs
from tests.kernels.helpers import DTYPES, INTERPRETED, bits, launch_grids, whole_storage

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="no Triton on CPU tensors"))
BACKENDS = ["reference", "cpu", TRITON]
CASES = [case for case in inputs.CASES if inputs.operator(case) in TAKES_OUT]
ATTENTION = ("paged_attention", "paged_attention_decode", "decode_branches")


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def plain_backend():
    """What does not depend on the backend is tested over the CPU forms."""
    with kernels.backend("cpu"):
        yield


def room(case: str, arguments: tuple):
    """Memory for the results of a call, full of NaN."""
    made = [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in results(inputs.operator(case), arguments)]
    return made[0] if len(made) == 1 else tuple(made)


def many(x) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def same_bits(ours, theirs) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(many(ours), many(theirs), strict=True))


# --- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param(torch.float64, id="fp64")])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_call_that_makes_its_memory(case, dtype, backend):
    operator = getattr(kernels, inputs.operator(case))
    ours, theirs = inputs.arguments(case, dtype=torch.float32), inputs.arguments(case, dtype=torch.float32)
    if dtype == torch.float64:
        ours, theirs = ([x.double() if _floating(x) else x for x in args] for args in (ours, theirs))
    else:
        ours, theirs = inputs.arguments(case, dtype=dtype), inputs.arguments(case, dtype=dtype)
    out = room(case, ours)
    with kernels.backend(backend):
        expected, got = operator(*theirs), operator(*ours, out=out)
    assert got is out and same_bits(out, expected)
    for i in inputs.mutated(case):
        assert torch.equal(bits(whole_storage(ours[i])), bits(whole_storage(theirs[i])))


def _floating(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ATTENTION)
def test_a_workspace_changes_nothing(case, backend):
    """Contexts of several splits, which alone work in it; whatever it holds before."""
    size = inputs.Size(**{**vars(inputs.TINY), "lengths": (1, 1, 18), "cached": (299, 0, 700)})
    arguments, again = inputs.arguments(case, size), inputs.arguments(case, size)
    q, cache, table = arguments[:3]
    with kernels.backend(backend):
        numbers = kernels.attention_workspace(q, cache, table)
        assert numbers == (3 * 4 * 3 * (16 + 2) if backend == "triton" else 0)
        workspace, out = torch.full((numbers + 5,), float("nan")), room(case, arguments)
        operator = getattr(kernels, inputs.operator(case))
        operator(*arguments, out=out, workspace=workspace)
        assert same_bits(out, operator(*again))
    assert workspace[numbers:].isnan().all() and bool(workspace[:numbers].isfinite().any()) == bool(numbers)


def test_leading_dims_of_the_activation():
    x, y = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4, 16)
    out = torch.full_like(x, float("nan"))
    assert kernels.silu_mul(x, y, out=out) is out and torch.equal(out, kernels.silu_mul(x, y))
    with pytest.raises(ValueError, match=r"^out: got shape \[24, 16\].*allowed: .*shape \[2, 3, 4, 16\]"):
        kernels.silu_mul(x, y, out=out.flatten(0, 2))


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["own", "onednn", "plain"])
def test_a_product(form, bias, rows, monkeypatch):
    from flexops.kernels import cpu_linear, linear

    if form != "own":
        monkeypatch.setattr(cpu_linear, "supports", lambda weight: False)
    if form == "plain":
        monkeypatch.setattr(linear, "_onednn", lambda weight: None)
    layer = PackedLinear(torch.randn(70, 48), torch.randn(70) if bias else None)
    if layer.form != form:
        pytest.skip(f"fp32 is {layer.form} on this processor")
    x, out = torch.randn(rows, 48), torch.full((rows, 70), float("nan"))
    with torch.no_grad():
        assert layer(x, out) is out and torch.equal(out, layer(x))
        apart = torch.empty(rows + 1, 140)[:rows, ::2] if rows else out.half()
        for wrong in (out.double(), torch.empty(rows + 1, 70), apart, out.to("meta")):
            with pytest.raises(ValueError, match=rf"^out is .*it must be torch.float32 of shape \({rows}, 70\).*None"):
                layer(x, wrong)


class _Made(TorchDispatchMode):
    """Counts tensors that are made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = [x for x in many(made) if isinstance(x, torch.Tensor) and x.numel()]
        self.count += sum(x.untyped_storage().data_ptr() not in given for x in found)
        return made


TRITON_FILES = (
    "activation", "attention", "causal_conv1d", "decode_branches", "gate_pool", "kv_cache", "norm", "split_merge",
    "ssd_scan", "state_update",
)  # fmt: skip
# the scan keeps states between its launches; the CPU's fused decode counts its rows
MAKES = {("ssd_scan", "triton"): 3, ("decode_branches", "cpu"): 1}


@pytest.mark.parametrize("backend", ["cpu", TRITON])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_made_where_all_is_given(case, backend, monkeypatch):
    """Of the Triton forms, what is made around their launches; the kernels are not run."""
    arguments, name = inputs.arguments(case), inputs.operator(case)
    out = room(case, arguments)
    with kernels.backend(backend):
        ops = select(CPU)
    for file in TRITON_FILES if backend == "triton" else ():
        launch_grids(monkeypatch, importlib.import_module(f"flexops.kernels.{file}"))
    options = {"workspace": torch.empty(ops.attention_workspace(*arguments[:3]))} if case in ATTENTION else {}
    with _Made() as made:
        getattr(ops, name)(*arguments, out=out, **options)
    assert made.count == MAKES.get((name, backend), 0)


# --- torch.library --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    arguments, name = inputs.arguments(case), inputs.operator(case)
    outs = {f"out{i}": x for i, x in enumerate(many(room(case, arguments)))}
    torch.library.opcheck(getattr(torch.ops.flexops, f"{name}_out").default, arguments, outs)


@pytest.mark.parametrize("case", ["split_norm", "decode_branches"])
def test_torch_compile_in_one_graph(case):
    operator = getattr(kernels, inputs.operator(case))
    eager, compiled = inputs.arguments(case), inputs.arguments(case)
    out, expected = room(case, eager), operator(*eager)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda *args: operator(*args, out=out), fullgraph=True, backend="aot_eager")(*compiled)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


# --- what is refused ------------------------------------------------------------------------------------------


def _spoiled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that cannot take the result that x takes."""
    return {
        "shape": torch.full((x.shape[0] + 1, *x.shape[1:]), 7.0, dtype=x.dtype),
        "dtype": torch.full(x.shape, 7, dtype=torch.int32),
        "strides": torch.full((x.shape[0], *x.shape[1:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)[..., ::2],
    }


@pytest.mark.parametrize("kind", ["shape", "dtype", "strides", "device"])
@pytest.mark.parametrize("case", CASES)
def test_wrong_memory_is_refused_before_anything_is_written(case, kind):
    arguments, operator = inputs.arguments(case), getattr(kernels, inputs.operator(case))
    right = many(room(case, arguments))
    before = [bits(whole_storage(arguments[i])).clone() for i in inputs.mutated(case)]
    for i in range(len(right)):
        # a call with a meta tensor goes to the fake, so that kind is shown to the check itself
        wrong = right[i].to("meta") if kind == "device" else _spoiled(right[i])[kind]
        out = (*right[:i], wrong, *right[i + 1 :])
        name = r"out" if len(right) == 1 else rf"out\[{i}\]"
        message = rf"^{name}: got shape .*allowed: contiguous memory of shape .*device cpu, or None"
        with pytest.raises(ValueError, match=message):
            if kind == "device":
                kernels.results.check_given(inputs.operator(case), arguments, out)
            else:
                operator(*arguments, out=out if len(out) > 1 else out[0])
    assert all(x.isnan().all() for x in right)
    for i, old in zip(inputs.mutated(case), before, strict=True):
        assert torch.equal(bits(whole_storage(arguments[i])), old)


def test_a_wrong_number_of_tensors_is_refused():
    arguments = inputs.arguments("state_update")
    y, _ = room("state_update", arguments)
    with pytest.raises(ValueError, match=r"^out: got 1 tensors; allowed: 2, one for each result of state_update"):
        kernels.state_update(*arguments, out=y)
    arguments = inputs.arguments("gather_rows")
    with pytest.raises(ValueError, match=r"^out: got 2 tensors; allowed: 1"):
        kernels.gather_rows(*arguments, out=(y, y))


@pytest.mark.skipif(not INTERPRETED, reason="no Triton on CPU tensors")
@pytest.mark.parametrize("case", ATTENTION)
def test_a_workspace_that_is_too_small_or_of_another_kind_is_refused(case):
    arguments, operator = inputs.arguments(case), getattr(kernels, inputs.operator(case))
    out = room(case, arguments)
    with pytest.raises(ValueError, match=r"^workspace: given to .* without out; allowed: with out, or None"):
        operator(*arguments, workspace=torch.empty(1000))
    with kernels.backend("triton"):
        numbers = kernels.attention_workspace(*arguments[:3])
        for wrong in (torch.empty(numbers - 1), torch.empty(numbers).double(), torch.empty(2 * numbers)[::2]):
            with pytest.raises(ValueError, match=rf"^workspace: got .*allowed: .*at least {numbers} numbers.*None"):
                operator(*arguments, out=out, workspace=wrong)


DIFFERENTIABLE = ["silu_mul", "gated_rms_norm", "finish_gated_norm", "gather_rows", "causal_conv1d", "ssd_scan"]


@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_memory_is_refused_where_a_gradient_is_recorded(case):
    arguments = list(inputs.arguments(case))[: {"causal_conv1d": 5, "ssd_scan": 10}.get(case)]
    out = room(case, tuple(arguments))
    arguments[0] = arguments[0].detach().clone().requires_grad_()
    with pytest.raises(
        ValueError, match=rf"^out: given to {case} where a gradient is recorded; allowed: torch.no_grad"
    ):
        getattr(kernels, case)(*arguments, out=out)
    with torch.no_grad():
        getattr(kernels, case)(*arguments, out=out)
    assert not out.isnan().any()


# --- padding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [(3, 0, 16), (299, 0, 700)], ids=["one split", "splits"])
def test_attention_of_a_request_without_keys_is_zero(cached, dtype, backend):
    """context_lens 0 and no pages; the others have the bits that they have beside a request with keys."""
    size = inputs.Size(**{**vars(inputs.TINY), "cached": cached})
    q, cache, table, bounds, lens, scale, longest = inputs.arguments("paged_attention_decode", size, dtype)
    with kernels.backend(backend):
        expected = kernels.paged_attention(q, cache, table, bounds, lens, scale, longest)
        for padding in ([1], [0, 2], [0, 1, 2]):
            t, n, live = table.clone(), lens.clone(), [r for r in range(3) if r not in padding]
            t[padding], n[padding] = -1, 0
            got = kernels.paged_attention(q, cache, t, bounds, n, scale, longest)
            assert not got[padding].any() and torch.equal(bits(got[live]), bits(expected[live]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_of_attention_between_prefills(backend):
    """A request of one query without keys in a call that has longer ones too."""
    q, cache, table, bounds, lens, scale, longest = inputs.arguments("paged_attention")
    with kernels.backend(backend):
        expected = kernels.paged_attention(q, cache, table, bounds, lens, scale, longest)
        table[1], lens[1] = -1, 0
        got = kernels.paged_attention(q, cache, table, bounds, lens, scale, longest)
    assert not got[5].any()
    assert torch.equal(got[:5], expected[:5]) and torch.equal(got[6:], expected[6:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_of_padding_alone_give_zeros_and_write_nothing(dtype, backend):
    arguments = list(inputs.arguments("decode_branches", dtype=dtype))
    arguments[2].fill_(-1)
    arguments[3].zero_()
    for i in (15, 16, 18, 19):  # pages of windows and states
        arguments[i].fill_(-1)
    arguments[13].zero_()  # positions
    before = [bits(whole_storage(arguments[i])).clone() for i in (1, 14, 17)]
    with kernels.backend(backend):
        results = kernels.decode_branches(*arguments)
    assert all(not x.any() for x in results)
    for i, old in zip((1, 14, 17), before, strict=True):
        assert torch.equal(bits(whole_storage(arguments[i])), old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_minus_one(backend):
    """Zero rows where a result is read on; the residual stream, the cache and other rows stay as they were."""
    none = ints([-1, -1, -1])
    with kernels.backend(backend):
        x, delta, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
        before = x.clone()
        assert not kernels.gather_rows(x, none).any()
        assert not kernels.split_norm(x, delta, weight, 1e-5, none).any() and torch.equal(x, before)
        u = kernels.merge_norm(x, delta, delta, none, weight, 1e-5)
        assert torch.equal(x, before)
        torch.testing.assert_close(u, reference.rms_norm(before, weight, 1e-5))
        kernels.scatter_rows(x, delta, none)
        assert torch.equal(x, before)
        zeros = torch.zeros(3, 32)
        assert not kernels.finish_gated_norm(zeros, torch.zeros(3, 4), torch.randn(32), 1e-5, 2).any()
        q, k, v, cos_sin, positions, cache, slots = inputs.arguments("append_kv")
        rotated = kernels.append_kv(q, k, v, cos_sin, positions * 0, cache, slots.fill_(-1))
        assert cache.isnan().all() and torch.equal(rotated, q), "position 0 does not rotate"


def test_more_than_one_query_without_keys_is_refused():
    q, cache, table, bounds, lens, scale, longest = inputs.arguments("paged_attention")
    lens[2] = 0
    with pytest.raises(ValueError, match=r"^context_lens: request 2 has 0; .* or 0 for one query of padding"):
        kernels.paged_attention(q, cache, table, bounds, lens, scale, longest)
