"""`decode_branches` in Triton: the attention tiles and the state tiles of one layer's decodes in a single grid.

A program is one `decode_tile` or one `state_update_tile`, so that either branch fills what the other leaves idle, and
one launch does what two did. The two kinds alternate over the grid in proportion to their numbers. A program computes
what the kernel of its own branch computes, with as many warps: the results have the bits of `paged_attention` and
`state_update`. Contexts of several splits are summed in a second, small launch, as in `paged_attention`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import LOG2_E, DecodeLaunch, paged_attention
from .attention_tiles import decode_tile
from .state_update import heads_per_program, state_update, state_update_tile, update_constants, update_results

NUM_WARPS = 4  # of a state tile; an attention tile that takes more is launched on its own


@triton.jit(do_not_specialize=["requests", "splits_stride", "programs", "heads", "attention_programs", "all_programs"])
def _decode_branches_kernel(
    q,
    kv_cache,
    page_table,
    context_lens,
    attention_out,
    partial,
    stats,
    scale,
    q_stride,
    table_stride,
    requests,
    splits_stride,
    programs,
    xBC,
    z,
    dt,
    conv_weight,
    conv_bias,
    A_log,
    D,
    dt_bias,
    positions,
    conv_cache,
    conv_pages_in,
    conv_pages_out,
    state_cache,
    state_pages_in,
    state_pages_out,
    ssm_out,
    sums,
    heads,
    xBC_stride,
    z_stride,
    dt_stride,
    conv_page_stride,
    conv_in_stride,
    conv_out_stride,
    state_page_stride,
    state_in_stride,
    state_out_stride,
    attention_programs,
    all_programs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr,
    CHANNELS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program i is the n-th of attention where n = i * attention_programs // all_programs rises behind i."""
    pid = tl.program_id(0)
    share = tl.cast(attention_programs, tl.int64)
    before = (pid * share // all_programs).to(tl.int32)
    if (pid + 1) * share // all_programs > before:
        request = before // programs // KV_HEADS
        decode_tile(
            request,
            before // programs % KV_HEADS,
            before % programs,
            request,
            q,
            kv_cache,
            page_table,
            context_lens,
            attention_out,
            partial,
            stats,
            scale,
            q_stride,
            table_stride,
            requests,
            splits_stride,
            programs,
            KV_HEADS,
            GROUP,
            HEAD_DIM,
            PAGE_TOKENS,
            PAGE_STRIDE,
            SPLIT_TOKENS,
            MAX_SPLITS,
            BLOCK_ROWS,
            BLOCK_KEYS,
            BLOCK_DIM,
        )
    else:
        state_update_tile(
            pid - before,
            xBC,
            z,
            dt,
            conv_weight,
            conv_bias,
            A_log,
            D,
            dt_bias,
            positions,
            conv_cache,
            conv_pages_in,
            conv_pages_out,
            state_cache,
            state_pages_in,
            state_pages_out,
            ssm_out,
            sums,
            heads,
            xBC_stride,
            z_stride,
            dt_stride,
            conv_page_stride,
            conv_in_stride,
            conv_out_stride,
            state_page_stride,
            state_in_stride,
            state_out_stride,
            H,
            P,
            N,
            HEADS_PER_GROUP,
            HEADS_PER_PAGE,
            CHANNELS_PER_PAGE,
            K,
            BLOCK_X,
            BLOCK_P,
            BLOCK_N,
        )


@lru_cache(maxsize=64)
def _one_query_each(requests: int, device: torch.device) -> Tensor:
    """cu_seqlens of so many requests of one query, made once."""
    return torch.arange(requests + 1, dtype=torch.int32, device=device)


def decode_branches(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The decodes of both branches of one layer (Eq. 1 and Eq. 2) in one launch.

    q: [Ra, Hq, d], the query of each attention request; kv_cache, page_table, context_lens: as in `paged_attention`.
    xBC [Rs, C] and what follows: as in `state_update`; conv_cache and state_cache are written.
    out: attention [Ra, Hq, d] in the dtype of q, then those of `state_update`, contiguous, written; None makes them.
    workspace: as in `paged_attention`, written.
    Returns out, with the bits of the two operators.
    A branch without requests is not launched; nor are both together where a tile of attention takes more than
    NUM_WARPS warps, whose number would show in the bits of the other.
    """
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions, conv_cache, conv_pages_in, conv_pages_out)
    states = (state_cache, state_pages_in, state_pages_out)
    launch = DecodeLaunch.of(q, kv_cache, page_table) if q.shape[0] else None
    if launch is None or xBC.shape[0] == 0 or launch.num_warps != NUM_WARPS:
        rows, of_attention = _one_query_each(q.shape[0], q.device), None if out is None else out[0]
        attention = paged_attention(
            q, kv_cache, page_table, rows, context_lens, scale, 1, of_attention, workspace
        )  # fmt: skip
        return attention, *state_update(*ssm, *states, None if out is None else out[1:])
    requests, (num_requests, num_heads) = q.shape[0], dt.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device), *update_results(xBC, z, dt)
    partial, stats = launch.buffers(q, requests, workspace)
    attention, y, sums = out
    constants = update_constants(xBC, dt, conv_weight, conv_cache, state_cache)
    heads = heads_per_program(num_requests, num_heads, num_heads // constants["HEADS_PER_GROUP"])
    attention_programs = requests * launch.constants["KV_HEADS"] * launch.programs
    all_programs = attention_programs + num_requests * num_heads // heads
    _decode_branches_kernel[(all_programs,)](
        q,
        kv_cache,
        page_table,
        context_lens,
        attention,
        partial,
        stats,
        scale * LOG2_E,
        q.stride(0),
        page_table.stride(0),
        requests,
        launch.splits,
        launch.programs,
        *ssm,
        *states,
        y,
        sums,
        heads,
        *(t.stride(0) for t in (xBC, z, dt, conv_cache, conv_pages_in, conv_pages_out)),
        *(t.stride(0) for t in states),
        attention_programs,
        all_programs,
        **launch.constants,
        **constants,
        num_warps=NUM_WARPS,
        num_stages=1 if q.dtype == torch.float32 else 2,  # a second stage of fp32 keys would spill registers
    )
    launch.combine(None, context_lens, partial, stats, attention)
    return out
