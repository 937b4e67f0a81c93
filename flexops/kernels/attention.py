"""Causal attention over the paged KV cache in Triton: tiles for prefill, split keys for decode.

Query heads that share a KV head stand together in one tile, so keys and values are read once for all of them. Row i of
a request's queries for one KV head is (token i // GROUP, head i % GROUP).

What fixes the bits of a row: keys are visited in blocks counted from position 0, and blocks past the row's own
position change nothing (p = 0, scale 1). So neither the batch nor the cut of a prompt into calls matters. Requests
with one query take the split form, whatever shares their call: its splits depend on the request's own context only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexops.kernels.attention_tiles import attend, decode_tile, split_length

SPLIT_TOKENS = 256  # keys per split of a decode, as long as MAX_SPLITS splits suffice; then a multiple of it
MAX_SPLITS = 64
DECODE_PROGRAMS = 4096  # about how many programs a decode launch is given: many waves, few that find no split
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["tiles"])  # it varies from call to call
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    pages_ptr,
    cu_seqlens_ptr,
    context_ptr,
    out_ptr,
    scale,
    q_stride,
    pages_stride,
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One tile of BLOCK_ROWS query rows per program, the last tiles of a request, which see most keys, first."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles
    kv_head = pid // tiles % KV_HEADS
    request = pid // tiles // KV_HEADS
    start = tl.load(cu_seqlens_ptr + request)
    length = tl.load(cu_seqlens_ptr + request + 1) - start
    if (length <= 1) | (tile * BLOCK_ROWS >= length * GROUP):
        return
    context = tl.load(context_ptr + request)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = row // GROUP
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (query < length)[:, None] & (dim < HEAD_DIM)
    token = (start + query).to(tl.int64)[:, None]
    head = (kv_head * GROUP + row % GROUP)[:, None]
    q = tl.load(q_ptr + token * q_stride + head * HEAD_DIM + dim, mask=mask, other=0.0)
    position = context - length + query

    KV_OFFSET: tl.constexpr = KV_HEADS * PAGE_TOKENS * HEAD_DIM
    key_ptr = cache_ptr + kv_head * (PAGE_TOKENS * HEAD_DIM)
    pages_ptr += request.to(tl.int64) * pages_stride
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    lowest = context - length + tile * BLOCK_ROWS // GROUP
    highest = context - length + tl.minimum((tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, length - 1)
    seen_by_all = (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS
    for first in range(0, seen_by_all, BLOCK_KEYS):
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
            False,
            PAGE_STRIDE,
            KV_OFFSET,
            PAGE_TOKENS,
            HEAD_DIM,
            BLOCK_KEYS,
            BLOCK_DIM,
        )
    for first in tl.range(seen_by_all, highest + 1, BLOCK_KEYS, num_stages=1):
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
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * (KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM + dim, out, mask=mask)


@triton.jit
def _decode_kernel(
    q_ptr,
    cache_ptr,
    pages_ptr,
    cu_seqlens_ptr,
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
    """`decode_tile` of each request that has one query."""
    pid = tl.program_id(0)
    request = pid // programs // KV_HEADS
    start = tl.load(cu_seqlens_ptr + request)
    if tl.load(cu_seqlens_ptr + request + 1) - start != 1:
        return
    decode_tile(
        request,
        pid // programs % KV_HEADS,
        pid % programs,
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


@triton.jit
def _combine_kernel(
    cu_seqlens_ptr,
    context_ptr,
    partial_ptr,
    stats_ptr,
    out_ptr,
    requests,
    splits_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Sums the splits of one head of one request, always as a tree over MAX_SPLITS places.

    Without cu_seqlens every request has one query, row r of request r.
    """
    pid = tl.program_id(0)
    request, head = pid // HEADS, pid % HEADS
    start = request
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + request)
        if tl.load(cu_seqlens_ptr + request + 1) - start != 1:
            return
    context = tl.load(context_ptr + request)
    splits = tl.cdiv(context, split_length(context, SPLIT_TOKENS, MAX_SPLITS))
    if splits <= 1:
        return
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, BLOCK_DIM)
    place = pid.to(tl.int64) * splits_stride + split
    top = tl.load(stats_ptr + place, mask=split < splits, other=float("-inf"))
    sums_ptr = stats_ptr + tl.cast(requests, tl.int64) * HEADS * splits_stride
    total = tl.load(sums_ptr + place, mask=split < splits, other=0.0)
    mask = (split < splits)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    shrink = tl.exp2(top - tl.max(top, axis=0))
    out = tl.sum(acc * shrink[:, None], axis=0) / tl.sum(total * shrink, axis=0)
    at = out_ptr + (start.to(tl.int64) * HEADS + head) * HEAD_DIM + dim
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def capability(device: torch.device) -> int:
    """The major compute capability that tiles are chosen for, 0 without a GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _prefill_tile(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """Query rows and keys per tile, warps and pipeline stages: the largest that do not spill registers."""
    if dtype == torch.float32:  # exact products, on plain fp32 units
        if head_dim <= 64:
            return 32, 32, 8, 1
        return (16, 16, 4, 1) if head_dim <= 128 else (16, 32, 8, 1)
    if head_dim > 128:
        return 64, 32, 8, 2
    # a tensor core that reads both operands from shared memory leaves registers for more keys
    return 128, 64 if head_dim <= 64 or capability(device) in (9, 10) else 32, 8, 3


@dataclass(frozen=True)
class DecodeLaunch:
    """How requests of one query are launched: what `_decode_kernel` and the fused decode launch share.

    splits: the most that a request may have.  programs: per request and KV head.  constants: of `decode_tile`.
    num_warps, num_stages: of the launch, so that registers do not spill.
    """

    splits: int
    programs: int
    constants: dict[str, int]
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, q: Tensor, kv_cache: Tensor, page_table: Tensor) -> "DecodeLaunch":
        """The launch for q [T, Hq, d] over kv_cache [num_pages, 2, Hk, page_tokens, d] and page_table [R, pages]."""
        shape = _shape(q, kv_cache)
        requests = page_table.shape[0]
        tile = max(16, triton.next_power_of_2(shape["GROUP"])) * shape["BLOCK_DIM"]
        exact = q.dtype == torch.float32  # products on plain fp32 units, whose operands lie in registers
        keys = 64 >> (exact + (tile > 8192))
        splits = max(1, min(MAX_SPLITS, triton.cdiv(page_table.shape[1] * shape["PAGE_TOKENS"], SPLIT_TOKENS)))
        return cls(
            splits=splits,
            programs=min(splits, max(1, DECODE_PROGRAMS // (requests * shape["KV_HEADS"]))),
            constants={
                **shape,
                "SPLIT_TOKENS": SPLIT_TOKENS,
                "MAX_SPLITS": MAX_SPLITS,
                "BLOCK_ROWS": tile // shape["BLOCK_DIM"],
                "BLOCK_KEYS": keys,
            },
            num_warps=8 if tile > (2048 if exact else 4096) else 4,
            # sums in tensor memory pass through registers to be scaled
            num_stages=1 if tile > 8192 and capability(q.device) == 10 and not exact else 3,
        )

    def workspace(self, q: Tensor, requests: int) -> int:
        """Numbers of fp32 for the splits of so many requests: sums of p v, and maxima and sums of p."""
        heads, head_dim = q.shape[1:]
        return requests * heads * self.splits * (head_dim + 2)

    def buffers(self, q: Tensor, requests: int, workspace: Tensor | None) -> tuple[Tensor, Tensor]:
        """partial [R, Hq, splits, d] and stats [2, R, Hq, splits] in the workspace; None makes one."""
        heads, head_dim = q.shape[1:]
        if workspace is None:
            workspace = torch.empty(self.workspace(q, requests), dtype=torch.float32, device=q.device)
        sums = requests * heads * self.splits
        partial = workspace[: sums * head_dim].view(requests, heads, self.splits, head_dim)
        stats = workspace[sums * head_dim : sums * (head_dim + 2)]
        return partial, stats.view(2, requests, heads, self.splits)

    def combine(
        self, cu_seqlens: Tensor | None, context_lens: Tensor, partial: Tensor, stats: Tensor, out: Tensor
    ) -> None:
        """Sum the splits into out, where there may be more than one."""
        if self.splits == 1:
            return
        requests, heads = partial.shape[:2]
        _combine_kernel[(requests * heads,)](
            cu_seqlens,
            context_lens,
            partial,
            stats,
            out,
            requests,
            self.splits,
            HEADS=heads,
            HEAD_DIM=out.shape[2],
            SPLIT_TOKENS=SPLIT_TOKENS,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK_DIM=self.constants["BLOCK_DIM"],
            num_warps=4,
        )


def _shape(q: Tensor, kv_cache: Tensor) -> dict[str, int]:
    """The constants that prefill and decode share."""
    kv_heads, page_tokens, head_dim = kv_cache.shape[2:]
    return {
        "KV_HEADS": kv_heads,
        "GROUP": q.shape[1] // kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": page_tokens,
        "PAGE_STRIDE": kv_cache.stride(0),
        "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
    }


def attention_workspace(q: Tensor, kv_cache: Tensor, page_table: Tensor) -> int:
    """Numbers of fp32 that `paged_attention` and `decode_branches` work in, for these arguments of theirs."""
    return DecodeLaunch.of(q, kv_cache, page_table).workspace(q, page_table.shape[0])


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over their requests' pages (Eq. 1).

    q: [T, Hq, d] fp32/bf16/fp16, already rotated, contiguous but for dim 0.
    kv_cache: [num_pages, 2, Hk, page_tokens, d], contiguous but for dim 0; read in the dtype of q.
    page_table: [R, pages] int32, contiguous but for dim 0, -1 past the context.
    cu_seqlens: [R+1] int32, from 0 to T.
    context_lens: [R] int32, tokens in the cache, the queries' own included: query j of request r sits at position
        context_lens[r] - query_len[r] + j; 0 with one query is padding, whose row is zero.
    max_query_len: the longest query or more.
    out: [T, Hq, d] contiguous, dtype of q, written; None makes it.
    workspace: fp32, `attention_workspace` numbers or more, written; None makes it.
    Returns out; accumulates in fp32. A request's rows do not depend on the rest of the
    batch, nor on how its queries were cut into calls of two tokens or more.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    requests = cu_seqlens.numel() - 1
    if q.shape[0] == 0 or requests == 0:
        return out
    tensors = (q, kv_cache, page_table, cu_seqlens, context_lens, out)
    numbers = (scale * LOG2_E, q.stride(0), page_table.stride(0))
    if max_query_len > 1:
        shape = _shape(q, kv_cache)
        rows, keys, warps, stages = _prefill_tile(q.shape[2], q.dtype, q.device)
        tiles = triton.cdiv(max_query_len * shape["GROUP"], rows)
        _prefill_kernel[(requests * shape["KV_HEADS"] * tiles,)](
            *tensors,
            *numbers,
            tiles,
            **shape,
            BLOCK_ROWS=rows,
            BLOCK_KEYS=keys,
            num_warps=warps,
            num_stages=stages,
        )
    # prefill leaves requests of one query, and decode those of more: each request has one form, whatever its batch
    launch = DecodeLaunch.of(q, kv_cache, page_table)
    partial, stats = launch.buffers(q, requests, workspace)
    _decode_kernel[(requests * launch.constants["KV_HEADS"] * launch.programs,)](
        *tensors,
        partial,
        stats,
        *numbers,
        requests,
        launch.splits,
        launch.programs,
        **launch.constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    launch.combine(cu_seqlens, context_lens, partial, stats, out)
    return out
