"""The operators as `torch.ops.flexops.*`, so that torch.compile and torch.export see one node for each.

An implementation checks its arguments and calls the backend of the device; a fake gives shapes only. Operators that
write into an argument say so in their schema and do not return it; so does `<operator>_out`, which writes its results
to memory of the caller. fp64 runs the definition on every backend.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from . import checks, reference
from .dispatch import select
from .results import check_given, check_workspace, results

_LIBRARY = torch.library.Library("flexops", "DEF")

_SEQUENCE_CACHE = (
    "Tensor(a!)? {}=None, Tensor? initial_pages=None, Tensor? final_pages=None, Tensor? checkpoint_rows=None, "
    "Tensor? checkpoint_pages=None) -> Tensor"
)

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "silu_mul": "(Tensor gate, Tensor up) -> Tensor",
    "gated_rms_norm": "(Tensor x, Tensor? gate, Tensor weight, float eps, SymInt n_groups) -> Tensor",
    "finish_gated_norm": "(Tensor x, Tensor sum_squares, Tensor weight, float eps, SymInt n_groups) -> Tensor",
    "gate_pool": "(Tensor(a!) residual, Tensor? delta, Tensor weight, float eps, Tensor w1) -> (Tensor, Tensor)",
    "gate_route": "(Tensor z, Tensor cu_seqlens, Tensor b1, Tensor w2, Tensor b2, Tensor? bias) -> (Tensor, Tensor)",
    "gather_rows": "(Tensor x, Tensor index) -> Tensor",
    "scatter_rows": "(Tensor(a!) out, Tensor x, Tensor index) -> ()",
    "scattered_rows": "(Tensor out, Tensor x, Tensor index) -> Tensor",
    "split_norm": "(Tensor(a!) residual, Tensor? delta, Tensor weight, float eps, Tensor order) -> Tensor",
    "merge_norm": "(Tensor(a!) residual, Tensor y_attention, Tensor y_ssm, Tensor inverse, Tensor weight, float eps) "
    "-> Tensor",
    "apply_rope": "(Tensor x, Tensor cos_sin, Tensor positions) -> Tensor",
    "append_kv": "(Tensor q, Tensor k, Tensor v, Tensor? cos_sin, Tensor positions, Tensor(a!) kv_cache, "
    "Tensor slot_mapping) -> Tensor",
    "paged_attention": "(Tensor q, Tensor kv_cache, Tensor page_table, Tensor cu_seqlens, Tensor context_lens, "
    "float scale, SymInt max_query_len) -> Tensor",
    "causal_conv1d": "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor seq_starts, "
    + _SEQUENCE_CACHE.format("conv_cache"),
    "ssd_scan": "(Tensor x, Tensor dt, Tensor A_log, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, "
    "Tensor cu_seqlens, Tensor seq_starts, SymInt chunk_size, " + _SEQUENCE_CACHE.format("state_cache"),
    "state_update": "(Tensor xBC, Tensor z, Tensor dt, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor? D, "
    "Tensor? dt_bias, Tensor positions, Tensor(a!) conv_cache, Tensor conv_pages_in, Tensor conv_pages_out, "
    "Tensor(b!) state_cache, Tensor state_pages_in, Tensor state_pages_out) -> (Tensor, Tensor)",
    "decode_branches": "(Tensor q, Tensor kv_cache, Tensor page_table, Tensor context_lens, float scale, Tensor xBC, "
    "Tensor z, Tensor dt, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor? D, Tensor? dt_bias, "
    "Tensor positions, Tensor(a!) conv_cache, Tensor conv_pages_in, Tensor conv_pages_out, Tensor(b!) state_cache, "
    "Tensor state_pages_in, Tensor state_pages_out) -> (Tensor, Tensor, Tensor)",
}


def raw(name: str, first: Tensor) -> Callable:
    """The unchecked operator for tensors like `first`, on their GPU where another one is current."""
    device = first.device
    function = getattr(reference if first.dtype == torch.float64 else select(device), name)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return partial(_run_on, device, function)
    return function


def _run_on(device: torch.device, function: Callable, *args, **named):
    """Triton launches on the current device, whatever device its tensors are on."""
    with torch.cuda.device(device):
        return function(*args, **named)


def _implementation(name: str) -> Callable:
    check = getattr(checks, name)

    def run(first: Tensor, *rest):
        check(first, *rest)
        return raw(name, first)(first, *rest)

    return run


def _scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> None:
    checks.scatter_rows(out, x, index)
    raw("scatter_rows", out)(out, x, index)


def _scattered_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """`scatter_rows` into a copy: without side effects, so that autograd can be registered for it."""
    checks.scatter_rows(out, x, index)
    return raw("scatter_rows", out)(out.clone(memory_format=torch.contiguous_format), x, index)


def _append_kv(q: Tensor, *rest) -> Tensor:
    checks.append_kv(q, *rest)
    rotated = raw("append_kv", q)(q, *rest)
    # without rotation q itself may come back, and an operator's result must be memory of its own
    return rotated.clone() if rotated.data_ptr() == q.data_ptr() else rotated


def _fake(name: str) -> Callable:
    def run(first: Tensor, *rest):
        made = tuple(first.new_empty(shape, dtype=dtype) for shape, dtype in results(name, (first, *rest)))
        return made[0] if len(made) == 1 else made or None

    return run


# --- results in memory of the caller --------------------------------------------------------------------------

# operator: number of results, and whether it takes a workspace
TAKES_OUT = {
    "silu_mul": (1, False),
    "gated_rms_norm": (1, False),
    "finish_gated_norm": (1, False),
    "gate_pool": (2, False),
    "gather_rows": (1, False),
    "split_norm": (1, False),
    "merge_norm": (1, False),
    "append_kv": (1, False),
    "paged_attention": (1, True),
    "causal_conv1d": (1, False),
    "ssd_scan": (1, False),
    "state_update": (2, False),
    "decode_branches": (3, True),
}


def _out_schema(name: str) -> str:
    """The operator's arguments, then by name the memory that it writes, out0, out1, ..., and the workspace."""
    count, has_workspace = TAKES_OUT[name]
    outs = [f"Tensor({letter}!) out{i}" for i, letter in enumerate("xyz"[:count])]
    workspace = ["Tensor(w!)? workspace=None"] if has_workspace else []
    arguments = SCHEMAS[name][: SCHEMAS[name].rindex(") ->")]
    return f"{arguments}, *, {', '.join([*outs, *workspace])}) -> ()"


def _out_implementation(name: str) -> Callable:
    check, (count, has_workspace) = getattr(checks, name), TAKES_OUT[name]

    def run(first: Tensor, *rest, workspace: Tensor | None = None, **named: Tensor) -> None:
        arguments, out = (first, *rest), tuple(named[f"out{i}"] for i in range(count))
        check(*arguments)
        check_given(name, arguments, out)
        if workspace is not None:
            check_workspace(workspace, first, raw("attention_workspace", first)(*arguments[:3]))
        options = {"out": out if count > 1 else out[0]} | ({"workspace": workspace} if has_workspace else {})
        raw(name, first)(*arguments, **options)

    return run


# --- registration ---------------------------------------------------------------------------------------------

_IMPLEMENTATIONS = {"scatter_rows": _scatter_rows, "scattered_rows": _scattered_rows, "append_kv": _append_kv}

for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _IMPLEMENTATIONS.get(_name) or _implementation(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexops::{_name}", _fake(_name), lib=_LIBRARY)
for _name in TAKES_OUT:
    _LIBRARY.define(f"{_name}_out{_out_schema(_name)}")
    _LIBRARY.impl(f"{_name}_out", _out_implementation(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexops::{_name}_out", lambda *_, **named: None, lib=_LIBRARY)


# the overloads themselves: a call by name would look for them every time
OPS = SimpleNamespace(
    **{name: getattr(torch.ops.flexops, name).default for name in (*SCHEMAS, *(f"{name}_out" for name in TAKES_OUT))}
)


# --- gradients of the two plain row operators -----------------------------------------------------------------


def _zero_rows(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device))


def _gather_context(ctx, inputs, output) -> None:
    x, index = inputs
    ctx.save_for_backward(index)
    ctx.num_rows = x.shape[0]


def _gather_backward(ctx, grad: Tensor):
    (index,) = ctx.saved_tensors
    out = grad.new_zeros(ctx.num_rows, grad.shape[1])
    if ctx.num_rows == 0:
        return out, None
    return out.index_add(0, index.clamp(min=0), _zero_rows(grad, index >= 0)), None


def _scatter_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[2])


def _scatter_backward(ctx, grad: Tensor):
    """x gets the rows it was written to; what it overwrote gets nothing."""
    (index,) = ctx.saved_tensors
    keep = index >= 0
    if grad.shape[0] == 0:
        return grad, grad.new_zeros(index.shape[0], grad.shape[1]), None
    overwritten = torch.zeros(grad.shape[0], dtype=torch.int32, device=grad.device)
    overwritten = overwritten.index_add(0, index.clamp(min=0), keep.int())
    return _zero_rows(grad, overwritten == 0), _zero_rows(grad.index_select(0, index.clamp(min=0)), keep), None


torch.library.register_autograd("flexops::gather_rows", _gather_backward, setup_context=_gather_context, lib=_LIBRARY)
torch.library.register_autograd(
    "flexops::scattered_rows", _scatter_backward, setup_context=_scatter_context, lib=_LIBRARY
)
