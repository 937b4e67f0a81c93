"""What the programs of the attention launches share: a block of keys, and the tile of one decoded query.

`attention.py` launches them on their own, `decode_branches.py` beside the state updates.
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,
    acc,
    top,
    total,
    key_ptr,
    pages_ptr,
    first,
    context,
    position,
    scale,
    MASKED: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_OFFSET: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One block of keys, from position `first` on: new acc [rows, dim], running maximum and sum [rows] of its tile.

    Without MASKED, every key of the block must lie in the context and be seen by every row.
    """
    key = first + tl.arange(0, BLOCK_KEYS)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    if MASKED:
        page = tl.load(pages_ptr + key // PAGE_TOKENS, mask=key < context, other=0).to(tl.int64)
        mask = (key < context)[:, None] & (dim < HEAD_DIM)
    else:
        page = tl.load(pages_ptr + key // PAGE_TOKENS).to(tl.int64)
        mask = dim < HEAD_DIM
    at = key_ptr + (page * PAGE_STRIDE + key % PAGE_TOKENS * HEAD_DIM)[:, None] + dim
    k = tl.load(at, mask=mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    # explicit fma: masked and unmasked blocks must round alike, or the cut of a prompt would show
    p = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
    shrink = tl.exp2(top - new_top)
    v = tl.load(at + KV_OFFSET, mask=mask, other=0.0).to(q.dtype)
    acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, tl.fma(total, shrink, tl.sum(p, axis=1))


@triton.jit
def split_length(context, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys per split: the least multiple of SPLIT_TOKENS that covers the context in MAX_SPLITS."""
    return tl.cdiv(tl.maximum(context, 1), SPLIT_TOKENS * MAX_SPLITS) * SPLIT_TOKENS


@triton.jit
def decode_tile(
    request,
    kv_head,
    program,
    start,
    q_ptr,
    cache_ptr,
    pages_ptr,
    context_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale,
    q_stride,
    pages_stride,
    requests,
    splits_stride,
    programs,
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
):
    """The splits program, program + programs, ... of one request, whose query is row `start`, and one KV head.

    Each split is computed on its own, from nothing. A request of one split gets its result here, one of no keys zeros.
    Otherwise partial [R, Hq, splits, d] holds sums of p v, and stats [2, R, Hq, splits] the maxima and sums of p, for
    `_combine_kernel`.
    """
    context = tl.load(context_ptr + request)
    length = split_length(context, SPLIT_TOKENS, MAX_SPLITS)
    splits = tl.cdiv(context, length)
    row = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)
    at = head[:, None] * HEAD_DIM + dim
    HEADS: tl.constexpr = KV_HEADS * GROUP
    q = tl.load(q_ptr + start.to(tl.int64) * q_stride + at, mask=mask, other=0.0)
    position = tl.zeros([BLOCK_ROWS], tl.int32) + (context - 1)
    KV_OFFSET: tl.constexpr = KV_HEADS * PAGE_TOKENS * HEAD_DIM
    key_ptr = cache_ptr + kv_head * (PAGE_TOKENS * HEAD_DIM)
    pages_ptr += request.to(tl.int64) * pages_stride
    if (splits == 0) & (program == 0):
        zeros = tl.zeros([BLOCK_ROWS, BLOCK_DIM], out_ptr.dtype.element_ty)
        tl.store(out_ptr + start.to(tl.int64) * (HEADS * HEAD_DIM) + at, zeros, mask=mask)
    for split in range(program, splits, programs):
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        for first in range(split * length, tl.minimum(split * length + length, context), BLOCK_KEYS):
            acc, top, total = attend(
                q,
                acc,
                top,
                total,
                key_ptr,
                pages_ptr,
                first,
                context,
                position,
                scale,
                True,
                PAGE_STRIDE,
                KV_OFFSET,
                PAGE_TOKENS,
                HEAD_DIM,
                BLOCK_KEYS,
                BLOCK_DIM,
            )
        if splits == 1:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + start.to(tl.int64) * (HEADS * HEAD_DIM) + at, out, mask=mask)
        else:
            place = (request.to(tl.int64) * HEADS + head) * splits_stride + split
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim, acc, mask=mask)
            tl.store(stats_ptr + place, top, mask=row < GROUP)
            sums_ptr = stats_ptr + tl.cast(requests, tl.int64) * HEADS * splits_stride
            tl.store(sums_ptr + place, total, mask=row < GROUP)
