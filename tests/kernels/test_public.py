"""The public face: what it computes and differentiates, and how torch.compile and dispatch see it."""

import importlib
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flexops import kernels
from flexops.kernels import library, reference
from flexops.kernels.dispatch import select
from flexops.kernels.library import SCHEMAS
from tests.kernels import inputs
from tests.kernels.helpers import DTYPES, INTERPRETED, bits, check

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="no Triton on CPU tensors"))
OPERATORS = sorted({inputs.operator(case) for case in inputs.CASES})


def randn(*shape, seed=0):
    """On the CPU, also where the other kernel tests run on a GPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def plain_backend():
    """What does not depend on the backend is tested over the CPU forms."""
    with kernels.backend("cpu"):
        yield


# --- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", inputs.CASES)
def test_computes_what_the_reference_defines(case, dtype, backend):
    name = inputs.operator(case)
    arguments = inputs.arguments(case, dtype=dtype)
    with kernels.backend(backend):
        check(getattr(kernels, name), getattr(reference, name), *arguments, mutated=inputs.mutated(case))


@pytest.mark.parametrize("case", inputs.CASES)
def test_fp64_runs_the_definition(case):
    name = inputs.operator(case)
    a, b = (
        [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs.arguments(case)]
        for _ in range(2)
    )
    ours, defined = getattr(kernels, name)(*a), getattr(reference, name)(*b)
    torch.testing.assert_close(ours, defined, rtol=0, atol=0, equal_nan=True)
    for i in inputs.mutated(case):
        torch.testing.assert_close(a[i], b[i], rtol=0, atol=0, equal_nan=True)


def test_norm_and_activation_take_any_number_of_leading_dims():
    x, weight = randn(2, 3, 4, 16), randn(16, seed=1)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), kernels.rms_norm(x.flatten(0, 2), weight, 1e-5).view_as(x))
    assert kernels.silu_mul(x, x).shape == x.shape
    assert kernels.rms_norm(x[:0], weight, 1e-5).shape == (0, 3, 4, 16)


def test_append_kv_without_rotation_returns_memory_of_its_own():
    q, k, v, _, positions, cache, slots = inputs.arguments("append_kv")
    q = q.contiguous()
    result = kernels.append_kv(q, k, v, None, positions, cache, slots)
    assert torch.equal(result, q) and result.data_ptr() != q.data_ptr()


def test_in_place_operators_return_the_tensor_they_wrote():
    out, x, index = inputs.arguments("scatter_rows")
    assert kernels.scatter_rows(out, x, index) is out


# --- torch.library --------------------------------------------------------------------------------------------


def test_every_operator_is_registered():
    assert set(SCHEMAS) - {"scattered_rows"} == set(OPERATORS)
    no_operators = {"attention_workspace", "backend"}
    assert set(OPERATORS) | {"varlen_attention"} == {n for n in kernels.__all__ if n.islower()} - no_operators


@pytest.mark.parametrize("backend", ["cpu", TRITON])
@pytest.mark.parametrize("case", inputs.CASES)
def test_opcheck(case, backend):
    with kernels.backend(backend):
        torch.library.opcheck(getattr(torch.ops.flexops, inputs.operator(case)).default, inputs.arguments(case))


@pytest.mark.parametrize("operator", ["gather_rows", "scattered_rows"])
def test_opcheck_with_gradients(operator):
    arguments = inputs.arguments(operator.replace("scattered", "scatter"))
    arguments = [x.clone().requires_grad_() if x.is_floating_point() else x for x in arguments]
    torch.library.opcheck(getattr(torch.ops.flexops, operator).default, arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", inputs.CASES)
def test_torch_compile_in_one_graph(case, compiler):
    operator = getattr(kernels, inputs.operator(case))
    eager, compiled = inputs.arguments(case), inputs.arguments(case)
    torch._dynamo.reset()
    expected = operator(*eager)
    result = torch.compile(operator, fullgraph=True, backend=compiler)(*compiled)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for i in inputs.mutated(case):
        assert torch.equal(bits(compiled[i]), bits(eager[i]))


def test_torch_export_sees_one_node_per_operator():
    class Branch(torch.nn.Module):
        def forward(self, x, weight, index):
            return kernels.gather_rows(kernels.rms_norm(x, weight, 1e-5), index)

    arguments = randn(6, 16), randn(16, seed=1), ints([4, -1, 0])
    exported = torch.export.export(Branch(), arguments)
    nodes = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert nodes == [torch.ops.flexops.rms_norm.default, torch.ops.flexops.gather_rows.default]
    assert torch.equal(exported.module()(*arguments), Branch()(*arguments))


def test_torch_compile_with_dynamic_row_counts():
    torch._dynamo.reset()
    compiled = torch.compile(kernels.rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    weight = randn(16)
    for rows in (3, 7, 12):
        x = randn(rows, 16, seed=rows)
        assert torch.equal(compiled(x, weight, 1e-5), kernels.rms_norm(x, weight, 1e-5))


def test_torch_compile_of_a_block_with_gradients():
    """split -> branch -> merge of a custom model, trained under fullgraph compilation."""

    def block(x, weight, index):
        u = kernels.rms_norm(x, weight, 1e-5)
        rows = kernels.gather_rows(u, index)
        return kernels.scatter_rows(torch.zeros_like(x), kernels.silu_mul(rows, rows), index) + x

    torch._dynamo.reset()
    index, results = ints([4, 0, -1, 2]), []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        x, weight = randn(6, 16).requires_grad_(), randn(16, seed=1).requires_grad_()
        out = function(x, weight, index)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weight.grad))
    torch.testing.assert_close(results[0], results[1])


def test_compiled_state_update_over_two_views_of_one_pool():
    """Conv windows and states lie in the same pages: both caches are views of one buffer."""
    arguments = list(inputs.arguments("state_update"))
    shapes = [arguments[i].shape[1:].numel() for i in (9, 12)]
    pages = max(arguments[9].shape[0], arguments[12].shape[0])
    results = []
    for compiled in (False, True):
        pool = torch.zeros(2 * pages, max(shapes) + 8)
        for i, first, numel in ((9, 0, shapes[0]), (12, pages, shapes[1])):
            view = pool[:, :numel].unflatten(1, arguments[i].shape[1:])
            view[first : first + arguments[i].shape[0]] = arguments[i].nan_to_num()
            pages_in, pages_out = (
                torch.where(t >= 0, t + first, t) for t in inputs.arguments("state_update")[i + 1 : i + 3]
            )
            arguments[i + 1], arguments[i + 2] = pages_in, pages_out
        arguments_now = list(arguments)
        for i, numel in ((9, shapes[0]), (12, shapes[1])):
            arguments_now[i] = pool[:, :numel].unflatten(1, arguments[i].shape[1:])
        torch._dynamo.reset()
        function = kernels.state_update
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        results.append((*function(*arguments_now), pool))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


# --- gradients ------------------------------------------------------------------------------------------------


def test_gather_rows_gradient():
    index = ints([3, -1, 0, 3, 4])
    x = randn(5, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kernels.gather_rows(x, index), x)


@pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
def test_rows_of_an_empty_tensor_are_zero_and_give_no_gradient(backend):
    x, one, weight = torch.empty(0, 4, requires_grad=True), randn(1, 4), randn(4, seed=1)
    with kernels.backend(backend):
        rows = kernels.gather_rows(x, ints([-1, -1]))
        rows.sum().backward()
        y = randn(2, 4, seed=2).requires_grad_()
        kernels.scatter_rows(x.detach(), y, ints([-1, -1])).sum().backward()
        u = kernels.merge_norm(one.clone(), x.detach(), x.detach(), ints([-1]), weight, 1e-5)
    assert torch.equal(rows, torch.zeros(2, 4)) and x.grad.shape == (0, 4)
    assert torch.equal(y.grad, torch.zeros(2, 4))
    torch.testing.assert_close(u, reference.rms_norm(one, weight, 1e-5))


def test_scatter_rows_gradient():
    index = ints([3, -1, 0])
    out, x = randn(5, 4).double().requires_grad_(), randn(3, 4, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda out, x: kernels.scatter_rows(out.clone(), x, index), (out, x))


def test_scatter_rows_gradient_by_hand():
    index = ints([2, -1, 0])
    base, x = randn(4, 3).requires_grad_(), randn(3, 3, seed=1).requires_grad_()
    out = base * 1
    result = kernels.scatter_rows(out, x, index)
    assert result is out
    weights = randn(4, 3, seed=2)
    (out * weights).sum().backward()
    assert torch.equal(x.grad, torch.stack([weights[2], torch.zeros(3), weights[0]]))
    assert torch.equal(base.grad, torch.stack([torch.zeros(3), weights[1], torch.zeros(3), weights[3]]))


def test_scatter_rows_refuses_a_leaf():
    out = randn(4, 3).requires_grad_()
    with pytest.raises(ValueError, match=r"^out: a leaf.*allowed: out\.clone\(\)"):
        kernels.scatter_rows(out, randn(1, 3), ints([2]))


DIFFERENTIABLE = {
    "rms_norm": (0, 1),
    "silu_mul": (0, 1),
    "gated_rms_norm": (0, 1, 2),
    "finish_gated_norm": (0, 2),
    "gate_route": (0, 2, 3, 4),
    "gather_rows": (0,),
    "apply_rope": (0,),
    "causal_conv1d": (0, 1, 2),
    "ssd_scan": (0, 1, 2, 3, 4, 5, 6),
}


def _weighted_sum(result):
    out = result[0] if isinstance(result, tuple) else result
    return (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum()


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_gradients_agree_with_finite_differences_of_the_definition(operator):
    arguments = list(inputs.arguments(operator))[: {"causal_conv1d": 5, "ssd_scan": 10}.get(operator)]
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    for i in DIFFERENTIABLE[operator]:
        arguments[i] = arguments[i].detach().clone().requires_grad_()
    _weighted_sum(getattr(kernels, operator)(*arguments)).backward()
    for i in DIFFERENTIABLE[operator]:
        direction = randn(*exact[i].shape, seed=i).double()
        low, high = (
            _weighted_sum(getattr(reference, operator)(*exact[:i], exact[i] + step * direction, *exact[i + 1 :]))
            for step in (-1e-5, 1e-5)
        )
        ours = (arguments[i].grad.double() * direction).sum()
        torch.testing.assert_close(ours, (high - low) / 2e-5, rtol=1e-4, atol=1e-4)


def test_varlen_attention_is_paged_attention_from_an_empty_cache():
    lengths, heads, kv_heads, dim, page = (5, 0, 1, 18), 4, 2, 16, 16
    q, k, v = (randn(sum(lengths), h, dim, seed=h + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    cache = torch.zeros(4, 2, kv_heads, page, dim)
    table = ints([[0, -1], [-1, -1], [1, -1], [2, 3]])
    slots = torch.cat([torch.arange(5), page + torch.arange(1), 2 * page + torch.arange(18)])
    kernels.append_kv(q, k, v, None, ints(range(24)), cache, slots)
    bounds = ints([0, 5, 5, 6, 24])
    paged = kernels.paged_attention(q, cache, table, bounds, ints(lengths), dim**-0.5, 18)
    torch.testing.assert_close(kernels.varlen_attention(q, k, v, bounds, dim**-0.5), paged)


IN_PLACE = {
    "gate_pool": ("residual", 0),
    "split_norm": ("delta", 1),
    "merge_norm": ("y_ssm", 2),
    "append_kv": ("k", 1),
    "paged_attention": ("q", 0),
    "state_update": ("xBC", 0),
    "decode_branches": ("q", 0),
}


@pytest.mark.parametrize("operator", IN_PLACE)
def test_operators_without_gradient_say_so_and_run_under_no_grad(operator):
    name, position = IN_PLACE[operator]
    arguments = list(inputs.arguments(operator))
    arguments[position] = arguments[position].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: requires a gradient.*torch\.no_grad"):
        getattr(kernels, operator)(*arguments)
    with torch.no_grad():
        getattr(kernels, operator)(*arguments)


@pytest.mark.parametrize("operator", ["causal_conv1d", "ssd_scan"])
def test_scans_with_gradients_refuse_caches(operator):
    arguments = list(inputs.arguments(operator))
    arguments[0] = arguments[0].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{operator}: got a cache"):
        getattr(kernels, operator)(*arguments)


# --- dispatch -------------------------------------------------------------------------------------------------


def test_backend_is_forced_inside_and_restored_after_errors():
    assert select(CPU).__name__ == "flexops.kernels.cpu"
    with pytest.raises(KeyError), kernels.backend("reference"):
        assert select(CPU) is reference
        with kernels.backend("cpu"):
            assert select(CPU).__name__ == "flexops.kernels.cpu"
        raise KeyError
    assert select(CPU).__name__ == "flexops.kernels.cpu"


def test_backend_holds_for_one_thread_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    seen = []
    with kernels.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(select(CPU).__name__))
        thread.start()
        thread.join()
    assert seen == ["flexops.kernels.cpu"]


def test_backend_refuses_what_cannot_run(monkeypatch):
    with (
        pytest.raises(ValueError, match="backend: got 'cuda'; allowed: 'reference', 'cpu', 'triton'"),
        kernels.backend("cuda"),
    ):
        pass
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with kernels.backend("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.rms_norm(randn(2, 16), randn(16), 1e-5)
    with kernels.backend("cpu"), pytest.raises(ValueError, match="'cpu' got tensors on 'meta'"):
        select(torch.device("meta"))


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_an_operator_runs_on_the_gpu_of_its_tensors(monkeypatch, current, entered):
    """Triton launches on the current device: it is changed where the tensors are on another one, and only there."""
    devices, calls = [], []

    @contextmanager
    def guard(device):
        devices.append(device.index)
        yield
        devices.append("left")

    def operator(first, *rest):
        calls.append((list(devices), rest))
        return "result"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(library, "select", lambda device: SimpleNamespace(rms_norm=operator))
    first = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 1))
    assert library.raw("rms_norm", first)(first, 2, 3) == "result"
    assert calls == [(entered, (2, 3))] and devices == entered + ["left"] * len(entered)


def test_operators_keep_their_names_when_files_of_the_same_name_are_imported():
    pytest.importorskip("triton")
    for name in ("gate_pool", "ssd_scan", "state_update", "causal_conv1d", "triton_backend"):
        module = importlib.import_module(f"flexops.kernels.{name}")
        assert isinstance(module, ModuleType)
    for name in OPERATORS:
        assert getattr(kernels, name).__module__ == "flexops.kernels"
    assert kernels.reference is reference


def test_importing_kernels_on_a_cpu_needs_no_triton():
    """A machine without triton: its import fails, and everything else works."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from flexops import kernels\n"
        "print(kernels.rms_norm(torch.ones(2, 16), torch.ones(16), 0.0).sum().item())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 32.0
