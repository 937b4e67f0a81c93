"""The gate's operators on a CPU: one pass over memory each.

A row is read into fp32 scratch and worked on there; threads take some rows, or one request, at a time.
"""

import torch
from torch import Tensor

from flexops.kernels import reference
from flexops.kernels.cpu_launch import code_of, float_argument, kernel, next_part, table_of, unpack, vector_of
from flexops.kernels.cpu_rows import PART, normalise, read_residual_row
from flexops.kernels.cpu_simd import (
    F32,
    LANES,
    PAD,
    add_row,
    clear_bytes,
    dot_with,
    exp,
    get_f32,
    get_i32,
    lane,
    load,
    put_f32,
    put_i32,
    read_row,
    round_row,
    scratch,
    silu,
    splat,
    store,
    write_row,
)
from flexops.kernels.reference import ATTENTION, GATE_TILE, SSM


@kernel(15, floats=1)
def _gate_pool(arguments):
    (
        residual,
        residual_row,
        delta,
        delta_row,
        code,
        weight,
        weight_code,
        w1,
        w1_row,
        w1_code,
        u,
        z,
        rows,
        width,
        gate_dim,
    ) = unpack(arguments, 0, 15)
    eps = float_argument(arguments, 15)
    row, gain = scratch(width + PAD), scratch(width + PAD)
    read_row(gain, weight, weight_code, width)
    per_part = max(1, PART // width)
    first = next_part(arguments) * per_part
    while first < rows:
        for r in range(first, min(first + per_part, rows)):
            added = delta + r * delta_row * code if delta != 0 else 0
            read_residual_row(row, residual + r * residual_row * code, added, code, width)
            normalise(row, gain, width, eps)
            round_row(row, code, width)
            write_row(u + r * width * code, code, row, width)
            for e in range(gate_dim):
                put_f32(z, r * gate_dim + e, dot_with(row, w1 + e * w1_row * w1_code, w1_code, width))
        first = next_part(arguments) * per_part


def gate_pool(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    w1: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.gate_pool`."""
    codes = code_of(residual, weight, w1)
    if codes is None:
        return reference.gate_pool(residual, delta, weight, eps, w1, out)
    u, z = out or (torch.empty_like(residual), torch.empty((residual.shape[0], w1.shape[0])))
    _gate_pool(
        8 * u.nbytes,
        *(residual.data_ptr(), residual.stride(0)),
        *table_of(delta),
        *(codes[0], weight.data_ptr(), codes[1], w1.data_ptr(), w1.stride(0), codes[2]),
        *(u.data_ptr(), z.data_ptr(), *u.shape, w1.shape[0], eps),
    )
    return u, z


@kernel(16)
def _gate_route(arguments):
    (
        z,
        z_row,
        cu_seqlens,
        b1,
        b1_code,
        w2,
        w2_row,
        w2_code,
        b2,
        b2_code,
        bias,
        bias_code,
        probs,
        routes,
        requests,
        gate_dim,
    ) = unpack(arguments, 0, 16)
    pitch = (gate_dim + PAD - 1) & -PAD
    total, partial, hidden_bias, logit_bias, request_bias = (
        scratch(pitch),
        scratch(pitch),
        scratch(pitch),
        scratch(PAD),
        scratch(PAD),
    )
    read_row(hidden_bias, b1, b1_code, gate_dim)
    read_row(logit_bias, b2, b2_code, 2)
    put_f32(request_bias, 0, 0.0)
    r = next_part(arguments)
    while r < requests:
        start, end = get_i32(cu_seqlens, r), get_i32(cu_seqlens, r + 1)
        clear_bytes(total, pitch * F32)
        for tile in range(start, end, GATE_TILE):
            clear_bytes(partial, pitch * F32)
            for t in range(tile, min(tile + GATE_TILE, end)):
                add_row(partial, z + t * z_row * F32, F32, gate_dim)
            add_row(total, partial, F32, pitch)
        for i in range(0, pitch, LANES):
            store(total, i, silu(load(total, i) / splat(end - start) + load(hidden_bias, i)))
        if bias != 0:
            read_row(request_bias, bias + r * bias_code, bias_code, 1)
        attention = dot_with(total, w2, w2_code, gate_dim) + get_f32(logit_bias, 0) + get_f32(request_bias, 0)
        ssm = dot_with(total, w2 + w2_row * w2_code, w2_code, gate_dim) + get_f32(logit_bias, 1)
        largest = max(attention, ssm)
        e_attention = lane(exp(splat(attention - largest)), 0)
        e_ssm = lane(exp(splat(ssm - largest)), 0)
        put_f32(probs, 2 * r, e_attention / (e_attention + e_ssm))
        put_f32(probs, 2 * r + 1, e_ssm / (e_attention + e_ssm))
        put_i32(routes, r, ATTENTION if attention > ssm else SSM)
        r = next_part(arguments)


def gate_route(
    z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `reference.gate_route`."""
    codes = code_of(b1, w2, b2, bias)
    if codes is None or z.dtype != torch.float32:
        return reference.gate_route(z, cu_seqlens, b1, w2, b2, bias)
    requests = cu_seqlens.numel() - 1
    probs, routes = z.new_empty(requests, 2), torch.empty(requests, dtype=torch.int32)
    _gate_route(
        2 * z.nbytes,
        *(z.data_ptr(), z.stride(0), cu_seqlens.data_ptr(), b1.data_ptr(), codes[0]),
        *(w2.data_ptr(), w2.stride(0), codes[1], b2.data_ptr(), codes[2]),
        *vector_of(bias, codes[3]),
        *(probs.data_ptr(), routes.data_ptr(), requests, z.shape[1]),
    )
    return probs, routes
