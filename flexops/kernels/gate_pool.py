"""The prefill gate in Triton: its projected rows come out of the norm they follow, its choice out of one small pass.

`gate_pool` moves each row through memory once: a program keeps its rows in registers between the sum of squares and
what needs it, in column chunks that are unrolled. It reads W1 once for all its rows, from the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexops.kernels.norm import silu
from flexops.kernels.reference import GATE_TILE

TILES = 16  # tiles of GATE_TILE rows that gate_route reads at once


@triton.jit
def _gate_pool_kernel(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    w1_ptr,
    u_ptr,
    z_ptr,
    rows,
    eps,
    RESIDUAL_STRIDE: tl.constexpr,
    DELTA_STRIDE: tl.constexpr,
    W1_STRIDE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PROJECT_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLICES: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = row < rows
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = inside & (column < D)
        at = residual_ptr + row * RESIDUAL_STRIDE + column
        h = tl.load(at, mask=mask, other=0.0)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + row * DELTA_STRIDE + column, mask=mask, other=0.0)
            h = (h.to(tl.float32) + delta.to(tl.float32)).to(residual_ptr.dtype.element_ty)
            tl.store(at, h, mask=mask)
        chunks = chunks + (h,)  # noqa: RUF005  (Triton has no unpacking)
        squares += h.to(tl.float32) * h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    gate_dim = tl.arange(0, BLOCK_E)
    z = tl.zeros([SLICES, BLOCK_E, ROWS], tl.float32)  # a part of the columns per warp
    for i in tl.static_range(CHUNKS):
        column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = inside & (column < D)
        weight = tl.load(weight_ptr + column + 0 * row, mask=mask, other=0.0).to(tl.float32)
        u = (chunks[i].to(tl.float32) * scale * weight).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + row * D + column, u, mask=mask)
        w1_mask = (gate_dim[:, None] < E) & (column < D)
        w1 = tl.load(w1_ptr + gate_dim[:, None] * W1_STRIDE + column, mask=w1_mask, other=0.0)
        if PROJECT_FP32:
            u, w1 = u.to(tl.float32), w1.to(tl.float32)
        u = tl.permute(tl.reshape(u, [ROWS, SLICES, BLOCK // SLICES]), [1, 2, 0])
        w1 = tl.permute(tl.reshape(w1, [BLOCK_E, SLICES, BLOCK // SLICES]), [1, 0, 2])
        z = tl.dot(w1, u, z, input_precision="ieee")
    z = tl.trans(tl.sum(z, axis=0))
    tl.store(z_ptr + row * E + gate_dim[None, :], z, mask=inside & (gate_dim[None, :] < E))


def _gate_pool_tile(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows per program, column chunks, chunk width and warps: a thread keeps 64 elements, as many as do not spill."""
    columns = max(16, triton.next_power_of_2(width))
    warps = 8 if columns <= 2048 else 16
    rows = max(1, min(16, warps * 32 * 64 // columns))
    at_once = 4 if dtype == torch.float32 or columns > 8192 else 16
    chunks = triton.cdiv(rows * columns, warps * 32 * at_once)
    return rows, chunks, columns // chunks, warps


def gate_pool(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    w1: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer input of an adaptive layer: residual += delta, u = RMSNorm(residual), z = u W1^T in fp32.

    residual: [T, D] fp32/bf16/fp16, contiguous but for dim 0, updated in place.
    delta: [T, D] dtype of residual, contiguous but for dim 0, or None.
    weight: [D] any float dtype.
    w1: [E, D] any float dtype, contiguous but for dim 0.
    out: u [T, D] dtype of residual and z [T, E] fp32, contiguous, written; None makes them.
    Returns out; z is computed from u as rounded.
    """
    total, width = residual.shape
    gate_dim = w1.shape[0]
    if out is None:
        u = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        out = u, torch.empty((total, gate_dim), dtype=torch.float32, device=residual.device)
    u, z = out
    other = residual if delta is None else delta
    rows, chunks, block, warps = _gate_pool_tile(width, residual.dtype)
    if total:
        _gate_pool_kernel[(triton.cdiv(total, rows),)](
            residual,
            other,
            weight,
            w1,
            u,
            z,
            total,
            eps,
            RESIDUAL_STRIDE=residual.stride(0),
            DELTA_STRIDE=other.stride(0),
            W1_STRIDE=w1.stride(0),
            D=width,
            E=gate_dim,
            HAS_DELTA=delta is not None,
            PROJECT_FP32=w1.dtype != residual.dtype or w1.dtype == torch.float32,
            ROWS=rows,
            CHUNKS=chunks,
            BLOCK=block,
            BLOCK_E=max(16, triton.next_power_of_2(gate_dim)),
            SLICES=min(warps, block // 16),
            num_warps=warps,
        )
    return u, z


@triton.jit
def _gate_route_kernel(
    z_ptr,
    cu_seqlens_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    bias_ptr,
    probs_ptr,
    route_ptr,
    z_stride,
    w2_stride,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + request + 1).to(tl.int64) - start
    gate_dim = tl.arange(0, BLOCK_E)
    inside = gate_dim < E
    within = tl.arange(0, TILES * TILE)[:, None]
    total = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, length, TILES * TILE):
        at = z_ptr + (start + first + within) * z_stride + gate_dim[None, :]
        z = tl.load(at, mask=(first + within < length) & inside[None, :], other=0.0)
        partial = tl.sum(tl.reshape(z, [TILES, TILE, BLOCK_E]), axis=1)
        total += tl.sum(partial, axis=0)
    b1 = tl.load(b1_ptr + gate_dim, mask=inside, other=0.0).to(tl.float32)
    hidden = silu(total / length.to(tl.float32) + b1)
    w_attention = tl.load(w2_ptr + gate_dim, mask=inside, other=0.0).to(tl.float32)
    w_ssm = tl.load(w2_ptr + w2_stride + gate_dim, mask=inside, other=0.0).to(tl.float32)
    attention = tl.sum(hidden * w_attention, axis=0) + tl.load(b2_ptr).to(tl.float32)
    ssm = tl.sum(hidden * w_ssm, axis=0) + tl.load(b2_ptr + 1).to(tl.float32)
    if HAS_BIAS:
        attention += tl.load(bias_ptr + request).to(tl.float32)
    top = tl.maximum(attention, ssm)
    p_attention, p_ssm = tl.exp(attention - top), tl.exp(ssm - top)
    tl.store(probs_ptr + request * 2, p_attention / (p_attention + p_ssm))
    tl.store(probs_ptr + request * 2 + 1, p_ssm / (p_attention + p_ssm))
    tl.store(route_ptr + request, tl.where(attention > ssm, 0, 1))


def gate_route(
    z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gate's choice per request from the rows z of its whole prompt: top-1 of W2 silu(mean z + b1) + b2 (+ bias).

    z: [T, E] fp32, contiguous but for dim 0.
    cu_seqlens: [R+1] int32; no sequence is empty.
    b1: [E], w2: [2, E], b2: [2], any float dtype; rows of w2 are contiguous.
    bias: [R] any float dtype, added to the attention logit, or None.
    Returns probabilities [R, 2] fp32 (attention, ssm) and routes [R] int32; ties go to SSM. Rows are summed in one
    fixed order over tiles of GATE_TILE rows from the prompt's start, so the batch cannot change a bit.
    """
    requests, gate_dim = cu_seqlens.numel() - 1, z.shape[1]
    probs = torch.empty((requests, 2), dtype=torch.float32, device=z.device)
    route = torch.empty((requests,), dtype=torch.int32, device=z.device)
    if requests:
        _gate_route_kernel[(requests,)](
            z,
            cu_seqlens,
            b1,
            w2,
            b2,
            b2 if bias is None else bias,
            probs,
            route,
            z.stride(0),
            w2.stride(0),
            E=gate_dim,
            HAS_BIAS=bias is not None,
            TILES=TILES,
            TILE=GATE_TILE,
            BLOCK_E=triton.next_power_of_2(gate_dim),
            num_warps=8,
        )
    return probs, route
