"""Rotary embedding and the append to the paged KV cache in one Triton pass, all heads of a token per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    cos,
    sin,
    mask,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One token's heads [HEADS, HEAD_DIM], rounded to their own dtype, then to that of `out_ptr`."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    mask = mask & (head < HEADS)
    x_ptr += head * HEAD_DIM
    out_ptr += head * OUT_HEAD_STRIDE
    if ROTARY_HALF:
        dim = tl.arange(0, BLOCK_HALF)[None, :]
        in_half = mask & (dim < ROTARY_HALF)
        a = tl.load(x_ptr + dim, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + ROTARY_HALF + dim, mask=in_half, other=0.0).to(tl.float32)
        left = (a * cos - b * sin).to(x_ptr.dtype.element_ty)
        right = (b * cos + a * sin).to(x_ptr.dtype.element_ty)
        tl.store(out_ptr + dim, left.to(out_ptr.dtype.element_ty), mask=in_half)
        tl.store(out_ptr + ROTARY_HALF + dim, right.to(out_ptr.dtype.element_ty), mask=in_half)
    if 2 * ROTARY_HALF < HEAD_DIM:
        dim = 2 * ROTARY_HALF + tl.arange(0, BLOCK_REST)[None, :]
        in_rest = mask & (dim < HEAD_DIM)
        rest = tl.load(x_ptr + dim, mask=in_rest, other=0.0)
        tl.store(out_ptr + dim, rest.to(out_ptr.dtype.element_ty), mask=in_rest)


@triton.jit
def _append_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    slots_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    cos_sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """KV_HEADS = 0: rotation of q only."""
    token = tl.program_id(0).to(tl.int64)
    cos = 0.0
    sin = 0.0
    if ROTARY_HALF:
        dim = tl.arange(0, BLOCK_HALF)[None, :]
        row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
        cos = tl.load(row + dim, mask=dim < ROTARY_HALF, other=0.0).to(tl.float32)
        sin = tl.load(row + ROTARY_HALF + dim, mask=dim < ROTARY_HALF, other=0.0).to(tl.float32)
    q_row, out_row = q_ptr + token * q_stride, out_ptr + token * (HEADS * HEAD_DIM)
    _rotate_heads(
        q_row, out_row, cos, sin, True, HEADS, HEAD_DIM, HEAD_DIM, ROTARY_HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST
    )
    if KV_HEADS:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        keep = slot >= 0
        PER_HEAD: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        k_at = cache_ptr + slot // PAGE_TOKENS * PAGE_STRIDE + slot % PAGE_TOKENS * HEAD_DIM
        v_at = k_at + KV_HEADS * PER_HEAD
        _rotate_heads(
            k_ptr + token * k_stride,
            k_at,
            cos,
            sin,
            keep,
            KV_HEADS,
            HEAD_DIM,
            PER_HEAD,
            ROTARY_HALF,
            BLOCK_KV_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
        )
        head, dim = tl.arange(0, BLOCK_KV_HEADS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        mask = keep & (head < KV_HEADS) & (dim < HEAD_DIM)
        v = tl.load(v_ptr + token * v_stride + head * HEAD_DIM + dim, mask=mask, other=0.0)
        tl.store(v_at + head * PER_HEAD + dim, v.to(cache_ptr.dtype.element_ty), mask=mask)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
    kv_heads: int,
    page_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    tokens, heads, head_dim = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    block_heads, block_kv_heads = triton.next_power_of_2(heads), triton.next_power_of_2(max(kv_heads, 1))
    block_dim = triton.next_power_of_2(head_dim)
    if tokens:
        _append_kv_kernel[(tokens,)](
            q,
            k,
            v,
            q if cos_sin is None else cos_sin,
            positions,
            cache,
            slots,
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            0 if cos_sin is None else cos_sin.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAGE_TOKENS=page_tokens,
            PAGE_STRIDE=cache.stride(0),
            ROTARY_HALF=half,
            BLOCK_HEADS=block_heads,
            BLOCK_KV_HEADS=block_kv_heads,
            BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
            BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
            BLOCK_DIM=block_dim,
            num_warps=8 if block_heads * block_dim > 4096 else 4,
        )
    return out


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding in the half-split (NeoX, HF) form.

    x: [T, heads, d] fp32/bf16/fp16, contiguous but for dim 0.
    cos_sin: [max_position, rotary_dim] any float dtype, the cosines of rotary_dim/2 frequencies, then the sines;
        contiguous but for dim 0; dims of x past rotary_dim pass through.
    positions: [T] int32 or int64, rows of cos_sin.
    Returns [T, heads, d] contiguous, dtype of x; computed in fp32.
    """
    return _launch(x, x, x, cos_sin, positions, x, positions, kv_heads=0, page_tokens=1)


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """RoPE on q and k, and k, v written to their slots of the paged cache.

    q: [T, Hq, d], k, v: [T, Hk, d], fp32/bf16/fp16, contiguous but for dim 0 (slices of one projection).
    cos_sin: [max_position, rotary_dim] as in `apply_rope`, or None for no rotation.
    positions: [T] int32, rows of cos_sin.
    kv_cache: [num_pages, 2, Hk, page_tokens, d] float, contiguous but for dim 0, written in place.
    slot_mapping: [T] int64, page * page_tokens + offset; -1 writes nothing.
    out: [T, Hq, d] contiguous, dtype of q, written; None makes it.
    Returns out, the rotated q, never the memory of q; computed in fp32.
    """
    kv_heads, page_tokens = kv_cache.shape[2:4]
    return _launch(q, k, v, cos_sin, positions, kv_cache, slot_mapping, kv_heads, page_tokens, out)
