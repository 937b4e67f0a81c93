"""The least bytes that each operator can move: every input read once, every output written once.

Formulas of the sizes in a call's arguments, by the names in `tests/kernels/inputs.py`. Only the rows, pages and entries
that the tables name count, and an entry that is absent (-1) is neither read nor written.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _bytes(*tensors: Tensor | None) -> int:
    """Each tensor moved once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _rows(count: int, x: Tensor) -> int:
    """`count` rows of x."""
    return count * x.shape[1:].numel() * x.element_size()


def _named(index: Tensor) -> int:
    return int((index >= 0).sum())


def _least_norm(x: Tensor, *rest: Any) -> int:
    return 2 * _bytes(x) + _bytes(*(t for t in rest if isinstance(t, Tensor)))


def _least_gate_pool(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, w1: Tensor) -> int:
    return 3 * _bytes(residual) + _bytes(delta, weight, w1) + 4 * residual.shape[0] * w1.shape[0]


def _least_gate_route(z: Tensor, cu_seqlens: Tensor, *weights: Tensor) -> int:
    return _bytes(z, cu_seqlens, *weights) + (2 * 4 + 4) * (cu_seqlens.numel() - 1)


def _least_gather(x: Tensor, index: Tensor) -> int:
    return _rows(_named(index) + len(index), x) + _bytes(index)


def _least_scatter(out: Tensor, x: Tensor, index: Tensor) -> int:
    return 2 * _rows(_named(index), x) + _bytes(index)


def _least_split_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, order: Tensor) -> int:
    return 3 * _rows(_named(order), residual) + _rows(len(order), residual) + _bytes(weight, order)


def _least_merge_norm(
    residual: Tensor, y_attention: Tensor, y_ssm: Tensor, inverse: Tensor, weight: Tensor, eps: float
) -> int:
    return 3 * _bytes(residual) + _rows(_named(inverse), residual) + _bytes(inverse, weight)


def _least_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> int:
    return 2 * _bytes(x) + _rows(positions.unique().numel(), cos_sin) + _bytes(positions)


def _least_append_kv(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slots: Tensor
) -> int:
    kept = _named(slots)
    return _least_rope(q, cos_sin, positions) + 2 * _rows(kept, k) + 2 * _rows(kept, v) + _bytes(slots)


def _least_attention(
    q: Tensor, cache: Tensor, table: Tensor, cu_seqlens: Tensor, context_lens: Tensor, scale: float, longest: int
) -> int:
    token = 2 * cache.shape[2] * cache.shape[4] * cache.element_size()
    pages = int((-(-context_lens // cache.shape[3])).sum())
    return 2 * _bytes(q) + int(context_lens.sum()) * token + 4 * pages + _bytes(cu_seqlens, context_lens)


def _entries(table: Tensor) -> int:
    """Requests whose entry exists."""
    return _named(table[:, 0])


def _least_conv(
    x: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor, starts: Tensor, cache: Tensor, initial: Tensor,
    final: Tensor, checkpoint_rows: Tensor, checkpoint_pages: Tensor,
) -> int:  # fmt: skip
    channels, width = weight.shape
    row = channels * x.element_size()
    windows = (width - 1) * _entries(initial) + width * (_entries(final) + _entries(checkpoint_pages))
    tables = _bytes(cu_seqlens, starts, initial, final, checkpoint_rows, checkpoint_pages)
    return 2 * _bytes(x) + windows * row + _bytes(weight, bias) + tables


def _least_scan(*args: Any) -> int:
    x, dt, a_log, B, C, D, dt_bias, cu_seqlens, starts, _, cache, initial, final, rows, checkpoints = args
    state = x.shape[1] * cache.shape[2:].numel() * cache.element_size()
    states = _entries(initial) + _entries(final) + _entries(checkpoints)
    small = _bytes(a_log, D, dt_bias, cu_seqlens, starts, initial, final, rows, checkpoints)
    return 2 * _bytes(x) + _bytes(dt, B, C) + states * state + small


def _least_update(*args: Any) -> int:
    xBC, z, dt, weight, bias, a_log, D, dt_bias, positions = args[:9]
    _, conv_in, conv_out, state_cache, state_in, state_out = args[9:]
    live = state_out[:, 0] >= 0
    requests, reading = int(live.sum()), int((live & (state_in[:, 0] >= 0)).sum())
    state = a_log.numel() * state_cache.shape[2:].numel() * state_cache.element_size()
    row = xBC.shape[1] * xBC.element_size()
    windows = (weight.shape[1] - 1) * row * reading + weight.shape[1] * row * requests
    rows = _rows(requests, xBC) + _rows(requests, z) + _rows(requests, dt)
    results = _bytes(z) + 4 * dt.numel()
    tables = _bytes(positions, conv_in, conv_out, state_in, state_out)
    return (reading + requests) * state + windows + rows + results + _bytes(weight, bias, a_log, D, dt_bias) + tables


def _least_decode_branches(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, *ssm: Any) -> int:
    return _least_attention(q, cache, table, table[:0], lens, scale, 1) + _least_update(*ssm)


LEAST: dict[str, Callable[..., int]] = {
    "rms_norm": _least_norm,
    "silu_mul": lambda gate, up: 3 * _bytes(gate),
    "gated_rms_norm": _least_norm,
    "finish_gated_norm": _least_norm,
    "gate_pool": _least_gate_pool,
    "gate_route": _least_gate_route,
    "gather_rows": _least_gather,
    "scatter_rows": _least_scatter,
    "split_norm": _least_split_norm,
    "merge_norm": _least_merge_norm,
    "apply_rope": _least_rope,
    "append_kv": _least_append_kv,
    "paged_attention": _least_attention,
    "paged_attention_decode": _least_attention,
    "causal_conv1d": _least_conv,
    "ssd_scan": _least_scan,
    "state_update": _least_update,
    "decode_branches": _least_decode_branches,
}
