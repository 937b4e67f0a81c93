"""The operators on rows, on a CPU: norms, activation, split and merge; one pass over memory each.

A row is read into fp32 scratch, worked on there, and written back; threads take some rows at a time.
"""

import math

import torch
from torch import Tensor

from flexops.kernels import reference
from flexops.kernels.cpu_launch import code_of, float_argument, kernel, next_part, table_of, unpack
from flexops.kernels.cpu_simd import (
    F32,
    LANES,
    PAD,
    add_row,
    clear_bytes,
    copy_bytes,
    dot,
    get_f32,
    get_i32,
    inline,
    load,
    read_row,
    scratch,
    silu,
    splat,
    store,
    write_row,
)

PART = 8192  # elements of the rows that a thread takes at a time
_CHUNK = 512  # elements of a row that an elementwise operator holds in scratch


def _int32(index: Tensor) -> Tensor:
    return index if index.dtype == torch.int32 else index.int()


# --- norms and activation -------------------------------------------------------------------------------------


@inline
def _scale_row(row, gain, width, factor):
    for i in range(0, width, LANES):
        store(row, i, load(row, i) * splat(factor) * load(gain, i))


@inline
def normalise(row, gain, width, eps):
    """The RMS norm of one row in scratch."""
    _scale_row(row, gain, width, 1 / math.sqrt(dot(row, row, width) / width + eps))


@inline
def read_residual_row(row, home, delta, code, width):
    """A row of the residual stream into scratch, with a row that is added to it in place; delta 0 adds none."""
    read_row(row, home, code, width)
    if delta != 0:
        add_row(row, delta, code, width)
        write_row(home, code, row, width)


@kernel(8, floats=1)
def _rms_norm(arguments):
    x, x_row, code, weight, weight_code, out, rows, width = unpack(arguments, 0, 8)
    eps = float_argument(arguments, 8)
    row, gain = scratch(width + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for r in range(first, min(first + per_part, rows)):
            read_row(row, x + r * x_row * code, code, width)
            normalise(row, gain, width, eps)
            write_row(out + r * width * code, code, row, width)
        first = next_part(arguments) * per_part


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    codes = code_of(x, weight)
    if codes is None:
        return reference.rms_norm(x, weight, eps)
    width = x.shape[-1]
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    out = torch.empty_like(x)
    _rms_norm(
        out.nbytes,
        rows.data_ptr(),
        rows.stride(0),
        codes[0],
        weight.data_ptr(),
        codes[1],
        out.data_ptr(),
        rows.shape[0],
        width,
        eps,
    )
    return out


@kernel(8)
def _silu_mul(arguments):
    gate, gate_row, up, up_row, code, out, rows, width = unpack(arguments, 0, 8)
    g, u = scratch(_CHUNK), scratch(_CHUNK)
    chunks = (width + _CHUNK - 1) // _CHUNK
    per_part = PART // _CHUNK
    first = next_part(arguments) * per_part
    while first < rows * chunks:
        for part in range(first, min(first + per_part, rows * chunks)):
            r, start = part // chunks, part % chunks * _CHUNK
            count = min(_CHUNK, width - start)
            read_row(g, gate + (r * gate_row + start) * code, code, count)
            read_row(u, up + (r * up_row + start) * code, code, count)
            for i in range(0, count, LANES):
                store(g, i, silu(load(g, i)) * load(u, i))
            write_row(out + (r * width + start) * code, code, g, count)
        first = next_part(arguments) * per_part


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """See `reference.silu_mul`."""
    codes = code_of(gate, up)
    if codes is None:
        return reference.silu_mul(gate, up, out)
    out = torch.empty_like(gate) if out is None else out
    _silu_mul(
        3 * out.nbytes,
        gate.data_ptr(),
        gate.stride(0),
        up.data_ptr(),
        up.stride(0),
        codes[0],
        out.data_ptr(),
        *out.shape,
    )
    return out


@kernel(12, floats=1)
def _gated_rms_norm(arguments):
    x, x_row, code, gate, gate_row, gate_code, weight, weight_code, out, rows, width, groups = unpack(arguments, 0, 12)
    eps = float_argument(arguments, 12)
    size = width // groups
    row, other, gain = scratch(size + PAD), scratch(size + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for r in range(first, min(first + per_part, rows)):
            for start in range(0, width, size):
                read_row(row, x + (r * x_row + start) * code, code, size)
                if gate != 0:
                    read_row(other, gate + (r * gate_row + start) * gate_code, gate_code, size)
                    for i in range(0, size, LANES):
                        store(row, i, load(row, i) * silu(load(other, i)))
                normalise(row, gain + start * F32, size, eps)
                write_row(out + (r * width + start) * code, code, row, size)
        first = next_part(arguments) * per_part


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """See `reference.gated_rms_norm`."""
    codes = code_of(x, gate, weight)
    if codes is None:
        return reference.gated_rms_norm(x, gate, weight, eps, n_groups, out)
    out = torch.empty_like(x) if out is None else out
    _gated_rms_norm(
        3 * out.nbytes,
        *(x.data_ptr(), x.stride(0), codes[0]),
        *((0, 0, 0) if gate is None else (gate.data_ptr(), gate.stride(0), codes[1])),
        *(weight.data_ptr(), codes[2]),
        *(out.data_ptr(), *out.shape, n_groups, eps),
    )
    return out


@kernel(12, floats=1)
def _finish_gated_norm(arguments):
    x, x_row, code, sums, sums_row, weight, weight_code, out, rows, width, heads, groups = unpack(arguments, 0, 12)
    eps = float_argument(arguments, 12)
    size, heads_per_group = width // groups, heads // groups
    row, gain = scratch(size + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for r in range(first, min(first + per_part, rows)):
            for g in range(groups):
                total = 0.0
                for head in range(g * heads_per_group, (g + 1) * heads_per_group):
                    total += get_f32(sums, r * sums_row + head)
                start = g * size
                read_row(row, x + (r * x_row + start) * code, code, size)
                _scale_row(row, gain + start * F32, size, 1 / math.sqrt(total / size + eps))
                write_row(out + (r * width + start) * code, code, row, size)
        first = next_part(arguments) * per_part


def finish_gated_norm(
    x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """See `reference.finish_gated_norm`."""
    codes = code_of(x, weight)
    if codes is None or sum_squares.dtype != torch.float32:
        return reference.finish_gated_norm(x, sum_squares, weight, eps, n_groups, out)
    sums = sum_squares
    out = torch.empty_like(x) if out is None else out
    _finish_gated_norm(
        2 * out.nbytes,
        *(x.data_ptr(), x.stride(0), codes[0], sums.data_ptr(), sums.stride(0), weight.data_ptr(), codes[1]),
        *(out.data_ptr(), *out.shape, sums.shape[1], n_groups, eps),
    )
    return out


# --- split and merge ------------------------------------------------------------------------------------------


@kernel(6)
def _gather_rows(arguments):
    x, x_row, index, out, row_bytes, count = unpack(arguments, 0, 6)
    per_part = max(1, 4 * PART // row_bytes)
    first = next_part(arguments) * per_part
    while first < count:
        for i in range(first, min(first + per_part, count)):
            source = get_i32(index, i)
            if source >= 0:
                copy_bytes(out + i * row_bytes, x + source * x_row, row_bytes)
            else:
                clear_bytes(out + i * row_bytes, row_bytes)
        first = next_part(arguments) * per_part


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """See `reference.gather_rows`."""
    index = _int32(index)
    size = x.element_size()
    out = x.new_empty(index.shape[0], x.shape[1]) if out is None else out
    row_bytes = x.shape[1] * size
    _gather_rows(
        *(2 * out.nbytes, x.data_ptr(), x.stride(0) * size, index.data_ptr(), out.data_ptr(), row_bytes, out.shape[0])
    )
    return out


@kernel(7)
def _scatter_rows(arguments):
    out, out_row, x, x_row, index, row_bytes, count = unpack(arguments, 0, 7)
    per_part = max(1, 4 * PART // row_bytes)
    first = next_part(arguments) * per_part
    while first < count:
        for i in range(first, min(first + per_part, count)):
            target = get_i32(index, i)
            if target >= 0:
                copy_bytes(out + target * out_row, x + i * x_row, row_bytes)
        first = next_part(arguments) * per_part


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """See `reference.scatter_rows`."""
    index = _int32(index)
    size = x.element_size()
    _scatter_rows(
        2 * x.nbytes,
        *(out.data_ptr(), out.stride(0) * size, x.data_ptr(), x.stride(0) * size),
        *(index.data_ptr(), x.shape[1] * size, x.shape[0]),
    )
    return out


@kernel(11, floats=1)
def _split_norm(arguments):
    residual, residual_row, delta, delta_row, code, weight, weight_code, order, u, rows, width = unpack(
        arguments, 0, 11
    )
    eps = float_argument(arguments, 11)
    row, gain = scratch(width + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for i in range(first, min(first + per_part, rows)):
            r = get_i32(order, i)
            if r < 0:
                clear_bytes(u + i * width * code, width * code)
                continue
            added = delta + r * delta_row * code if delta != 0 else 0
            read_residual_row(row, residual + r * residual_row * code, added, code, width)
            normalise(row, gain, width, eps)
            write_row(u + i * width * code, code, row, width)
        first = next_part(arguments) * per_part


def split_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor, out: Tensor | None = None
) -> Tensor:
    """See `reference.split_norm`."""
    codes = code_of(residual, weight)
    if codes is None:
        return reference.split_norm(residual, delta, weight, eps, order, out)
    u = residual.new_empty(order.shape[0], residual.shape[1]) if out is None else out
    _split_norm(
        4 * u.nbytes,
        *(residual.data_ptr(), residual.stride(0)),
        *table_of(delta),
        *(codes[0], weight.data_ptr(), codes[1], order.data_ptr(), u.data_ptr(), *u.shape, eps),
    )
    return u


@kernel(14, floats=1)
def _merge_norm(arguments):
    residual, residual_row, y, y_row, y_ssm, y_ssm_row, split, inverse, code, weight, weight_code, u, rows, width = (
        unpack(arguments, 0, 14)
    )
    eps = float_argument(arguments, 14)
    row, gain = scratch(width + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for r in range(first, min(first + per_part, rows)):
            source, added = get_i32(inverse, r), 0
            if source >= split:
                added = y_ssm + (source - split) * y_ssm_row * code
            elif source >= 0:
                added = y + source * y_row * code
            read_residual_row(row, residual + r * residual_row * code, added, code, width)
            normalise(row, gain, width, eps)
            write_row(u + r * width * code, code, row, width)
        first = next_part(arguments) * per_part


def merge_norm(
    residual: Tensor,
    y_attention: Tensor,
    y_ssm: Tensor,
    inverse: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.merge_norm`."""
    codes = code_of(residual, weight)
    if codes is None:
        return reference.merge_norm(residual, y_attention, y_ssm, inverse, weight, eps, out)
    u = torch.empty_like(residual) if out is None else out
    _merge_norm(
        4 * u.nbytes,
        *(residual.data_ptr(), residual.stride(0), y_attention.data_ptr(), y_attention.stride(0)),
        *(y_ssm.data_ptr(), y_ssm.stride(0), y_attention.shape[0], inverse.data_ptr()),
        *(codes[0], weight.data_ptr(), codes[1], u.data_ptr(), *u.shape, eps),
    )
    return u
