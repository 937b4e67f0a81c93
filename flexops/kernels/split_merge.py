"""Rows between the packed batch and the two branches in Triton: copies, and the norms fused with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexops.kernels.norm import rms_scale, row_tile


@triton.jit
def _copy_rows_kernel(
    x_ptr,
    index_ptr,
    out_ptr,
    rows,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = x[index[i]], a zero row for -1; or, SCATTER, out[index[i]] = x[i], nothing for -1."""
    pid = tl.program_id(0)
    row = (pid // BLOCKS * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (pid % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = row < rows
    named = tl.load(index_ptr + row, mask=inside, other=-1).to(tl.int64)
    mask = (named >= 0) & (column < WIDTH)
    if SCATTER:
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
        tl.store(out_ptr + named * out_stride + column, x, mask=mask)
    else:
        x = tl.load(x_ptr + named * x_stride + column, mask=mask, other=0.0)
        tl.store(out_ptr + row * out_stride + column, x, mask=inside & (column < WIDTH))


def _copy_rows(x: Tensor, index: Tensor, out: Tensor, scatter: bool) -> None:
    width = x.shape[1]
    block = min(triton.next_power_of_2(width), 4096)
    rows, blocks = max(1, 1024 // block), triton.cdiv(width, block)
    if index.numel() and width:
        _copy_rows_kernel[(triton.cdiv(index.numel(), rows) * blocks,)](
            x,
            index,
            out,
            index.numel(),
            x.stride(0),
            out.stride(0),
            WIDTH=width,
            SCATTER=scatter,
            BLOCKS=blocks,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """out[i] = x[index[i]]; rows of index -1 are zero.

    x: [T, D] any dtype, contiguous but for dim 0.
    index: [M] int32 or int64, -1 or 0..T-1.
    out: [M, D] contiguous, dtype of x, written; None makes it.
    Returns out.
    """
    if out is None:
        out = torch.empty((index.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    _copy_rows(x, index, out, scatter=False)
    return out


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """out[index[i]] = x[i] in place; index -1 writes nothing, other indices must differ.

    out: [T, D] any dtype, contiguous but for dim 0, written in place.
    x: [M, D] dtype of out, contiguous but for dim 0.
    index: [M] int32 or int64, -1 or 0..T-1.
    Returns out.
    """
    _copy_rows(x, index, out, scatter=True)
    return out


@triton.jit
def _split_norm_kernel(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    order_ptr,
    u_ptr,
    rows,
    eps,
    residual_stride,
    delta_stride,
    D: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    source = tl.load(order_ptr + row, mask=inside, other=-1).to(tl.int64)
    mask = (source >= 0) & (column < D)
    at = residual_ptr + source * residual_stride + column
    h = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        h += tl.load(delta_ptr + source * delta_stride + column, mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(residual_ptr.dtype.element_ty)
        tl.store(at, rounded, mask=mask)
        h = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    u = h * rms_scale(h, D, eps) * weight
    tl.store(u_ptr + row * D + column, u.to(u_ptr.dtype.element_ty), mask=inside & (column < D))


def split_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor, out: Tensor | None = None
) -> Tensor:
    """Layer input where the routes are known: residual[j] += delta[j], u[i] = RMSNorm(residual[order[i]]).

    residual: [T, D] fp32/bf16/fp16, contiguous but for dim 0; the rows that `order` names are updated in place.
    delta: [T, D] dtype of residual, contiguous but for dim 0, or None.
    weight: [D] any float dtype.
    order: [M] int32, the packed row of each compact row, every packed row at most once; -1 gives a zero row.
    out: [M, D] contiguous, dtype of residual, written; None makes it.
    Returns u = out; sums in fp32.
    """
    width = residual.shape[1]
    u = torch.empty((order.numel(), width), dtype=residual.dtype, device=residual.device) if out is None else out
    rows, block, warps = row_tile(width)
    other = residual if delta is None else delta
    if u.numel():
        _split_norm_kernel[(triton.cdiv(order.numel(), rows),)](
            residual,
            other,
            weight,
            order,
            u,
            order.numel(),
            eps,
            residual.stride(0),
            other.stride(0),
            D=width,
            HAS_DELTA=delta is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return u


@triton.jit
def _merge_norm_kernel(
    residual_ptr,
    attention_ptr,
    ssm_ptr,
    weight_ptr,
    inverse_ptr,
    u_ptr,
    rows,
    attention_rows,
    eps,
    residual_stride,
    attention_stride,
    ssm_stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    mask = inside & (column < D)
    source = tl.load(inverse_ptr + row, mask=inside, other=-1).to(tl.int64)
    from_attention = (source >= 0) & (source < attention_rows)
    from_ssm = source >= attention_rows
    # at most one of the two loads moves data: the masks exclude each other, row by row
    attention_at = attention_ptr + source * attention_stride + column
    ssm_at = ssm_ptr + (source - attention_rows) * ssm_stride + column
    y = tl.load(attention_at, mask=from_attention & (column < D), other=0.0).to(tl.float32)
    y += tl.load(ssm_at, mask=from_ssm & (column < D), other=0.0).to(tl.float32)
    at = residual_ptr + row * residual_stride + column
    rounded = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + y).to(residual_ptr.dtype.element_ty)
    tl.store(at, rounded, mask=mask)
    h = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    u = h * rms_scale(h, D, eps) * weight
    tl.store(u_ptr + row * D + column, u.to(u_ptr.dtype.element_ty), mask=mask)


def merge_norm(
    residual: Tensor,
    y_attention: Tensor,
    y_ssm: Tensor,
    inverse: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """After the branches: residual[t] += y[inverse[t]], u = RMSNorm(residual), y the attention rows, then the SSM rows.

    residual: [T, D] fp32/bf16/fp16, contiguous but for dim 0, updated in place.
    y_attention: [Ma, D], y_ssm: [Ms, D], dtype of residual, contiguous but for dim 0.
    inverse: [T] int32, -1 (adds nothing) or 0..Ma+Ms-1.
    weight: [D] any float dtype.
    out: [T, D] contiguous, dtype of residual, written; None makes it.
    Returns u = out; sums in fp32.
    """
    total, width = residual.shape
    u = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) if out is None else out
    rows, block, warps = row_tile(width)
    if u.numel():
        _merge_norm_kernel[(triton.cdiv(total, rows),)](
            residual,
            y_attention,
            y_ssm,
            weight,
            inverse,
            u,
            total,
            y_attention.shape[0],
            eps,
            residual.stride(0),
            y_attention.stride(0),
            y_ssm.stride(0),
            D=width,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return u
