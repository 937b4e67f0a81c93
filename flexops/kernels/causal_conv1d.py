"""`causal_conv1d` in Triton: silu(bias + sum_k weight[:, k] x[t - K + 1 + k]), one launch.

A program walks down TOKENS rows of one sequence with the last inputs of its channels in registers, so each input is
read once. The program of a sequence's first rows is the only one that reads its initial window, and the one that then
writes its final window: the two may lie in the same pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
CHANNELS = 128  # one warp, four channels per lane: more would take too many registers for the rows in flight
LIST_BLOCK = 256  # entries of an index list that are looked at together


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _find_tile(index, cu_seqlens, num_sequences, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Where tile `index` lies if every sequence is cut into tiles of TILE rows, an empty one into one tile.

    Returns the sequence (num_sequences past the end) and the number of the tile in it.
    """
    sequence = 0
    before = 0  # tiles of the sequences before this one
    total = 0
    for first in range(0, num_sequences, BLOCK):
        i = first + tl.arange(0, BLOCK)
        exists = i < num_sequences
        length = tl.load(cu_seqlens + i + 1, mask=exists, other=0) - tl.load(cu_seqlens + i, mask=exists, other=0)
        tiles = tl.where(exists, tl.maximum((length + TILE - 1) // TILE, 1), 0)
        ends = total + tl.cumsum(tiles)
        passed = exists & (ends <= index)
        sequence += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        total += tl.sum(tiles)
    return sequence, index - before


@triton.jit
def count_between(low, high, values, num_values, BLOCK: tl.constexpr):
    """How many values of an int32 list lie in [low, high)."""
    count = 0
    for first in range(0, num_values, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(values + i, mask=i < num_values, other=0)
        count += tl.sum(((i < num_values) & (value >= low) & (value < high)).to(tl.int32))
    return count


@triton.jit
def _load_row(x, row, x_stride, channel, mask):
    return tl.load(x + tl.cast(row, tl.int64) * x_stride + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_input(
    row, start, position, x, x_stride, channel, mask, ring, ring_mask, RING_STRIDE: tl.constexpr, K: tl.constexpr
):
    """The input of packed row `row` >= start - K of a sequence: from x, or from the window before it.

    start, position: the sequence's first packed row and its absolute position.  ring: pointers to slot 0 of the
    initial window, ring_mask where there is one.
    """
    if row >= start:
        value = _load_row(x, row, x_stride, channel, mask)
    else:
        slot = (position + row - start + K) % K
        value = tl.load(ring + slot * RING_STRIDE, mask=ring_mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _write_window(
    row,
    start,
    position,
    x,
    x_stride,
    channel,
    mask,
    ring,
    ring_mask,
    ring_out,
    mask_out,
    RING_STRIDE: tl.constexpr,
    K: tl.constexpr,
):
    """Write the last K inputs up to packed row `row` to the ring at ring_out, which may be the initial one."""
    for back in tl.static_range(K):
        value = _load_input(row - back, start, position, x, x_stride, channel, mask, ring, ring_mask, RING_STRIDE, K)
        slot = (position + row - back - start + K) % K
        tl.store(ring_out + slot * RING_STRIDE, value.to(ring_out.dtype.element_ty), mask=mask_out)


@triton.jit
def _store_output(out, row, end, out_stride, channel, mask, bias, w3, w2, w1, w0, x3, x2, x1, x0, K: tl.constexpr):
    """The output of one row, if it lies before `end`, from its inputs (x3 the oldest) summed from old to new."""
    acc = bias
    if K > 3:
        acc += w3 * x3
    if K > 2:
        acc += w2 * x2
    acc += w1 * x1
    acc += w0 * x0
    pointers = out + tl.cast(row, tl.int64) * out_stride + channel
    tl.store(pointers, silu(acc).to(out.dtype.element_ty), mask=mask & (row < end))


@triton.jit
def causal_conv1d_kernel(
    x,
    weight,
    bias,
    out,
    cu_seqlens,
    seq_starts,
    conv_cache,
    initial_pages,
    final_pages,
    checkpoint_rows,
    checkpoint_pages,
    num_sequences,
    num_checkpoints,
    x_stride,
    out_stride,
    page_stride,
    initial_stride,
    final_stride,
    checkpoint_stride,
    CHANNELS: tl.constexpr,
    CHANNELS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
):
    sequence, tile = _find_tile(tl.program_id(0), cu_seqlens, num_sequences, TOKENS, BLOCK_LIST)
    if sequence >= num_sequences:
        return
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    position = tl.load(seq_starts + sequence)
    first = start + tile * TOKENS
    last = tl.minimum(first + TOKENS, end)

    # A block of channels never straddles pages, so that its page is one scalar.
    blocks_per_page: tl.constexpr = (CHANNELS_PER_PAGE + BLOCK_C - 1) // BLOCK_C
    page_index = tl.program_id(1) // blocks_per_page
    in_page = (tl.program_id(1) % blocks_per_page) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = page_index * CHANNELS_PER_PAGE + in_page
    mask = (in_page < CHANNELS_PER_PAGE) & (channel < CHANNELS)
    if initial_pages is None:
        ring = x + channel
        ring_mask = mask & False
    else:
        page = tl.load(initial_pages + tl.cast(sequence, tl.int64) * initial_stride + page_index)
        ring = conv_cache + tl.cast(page, tl.int64) * page_stride + in_page
        ring_mask = mask & (page >= 0)

    newest = weight + channel * K + K - 1
    w0 = tl.load(newest, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(newest - 1, mask=mask, other=0.0).to(tl.float32)
    w2 = w1
    w3 = w1
    if K > 2:
        w2 = tl.load(newest - 2, mask=mask, other=0.0).to(tl.float32)
    if K > 3:
        w3 = tl.load(newest - 3, mask=mask, other=0.0).to(tl.float32)
    b = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        b = tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)

    RING: tl.constexpr = CHANNELS_PER_PAGE
    x1 = _load_input(first - 1, start, position, x, x_stride, channel, mask, ring, ring_mask, RING, K)
    x2 = x1
    x3 = x1
    if K > 2:
        x2 = _load_input(first - 2, start, position, x, x_stride, channel, mask, ring, ring_mask, RING, K)
    if K > 3:
        x3 = _load_input(first - 3, start, position, x, x_stride, channel, mask, ring, ring_mask, RING, K)
    for row in range(first, last, 4):  # four loads in flight together
        a = _load_row(x, row, x_stride, channel, mask)
        c = _load_row(x, row + 1, x_stride, channel, mask & (row + 1 < last))
        d = _load_row(x, row + 2, x_stride, channel, mask & (row + 2 < last))
        e = _load_row(x, row + 3, x_stride, channel, mask & (row + 3 < last))
        _store_output(out, row, last, out_stride, channel, mask, b, w3, w2, w1, w0, x3, x2, x1, a, K)
        _store_output(out, row + 1, last, out_stride, channel, mask, b, w3, w2, w1, w0, x2, x1, a, c, K)
        _store_output(out, row + 2, last, out_stride, channel, mask, b, w3, w2, w1, w0, x1, a, c, d, K)
        _store_output(out, row + 3, last, out_stride, channel, mask, b, w3, w2, w1, w0, a, c, d, e, K)
        x3, x2, x1 = c, d, e

    if checkpoint_rows is not None:
        if count_between(first, last, checkpoint_rows, num_checkpoints, BLOCK_LIST) > 0:
            for s in range(num_checkpoints):
                row = tl.load(checkpoint_rows + s)
                page = tl.load(checkpoint_pages + tl.cast(s, tl.int64) * checkpoint_stride + page_index)
                ring_out = conv_cache + tl.cast(page, tl.int64) * page_stride + in_page
                if (row >= first) & (row < last) & (page >= 0):
                    _write_window(
                        row, start, position, x, x_stride, channel, mask, ring, ring_mask, ring_out, mask, RING, K
                    )
    if final_pages is not None:
        if tile == 0:
            page = tl.load(final_pages + tl.cast(sequence, tl.int64) * final_stride + page_index)
            if page >= 0:
                tl.debug_barrier()  # other threads may still read the initial window that is overwritten here
                ring_out = conv_cache + tl.cast(page, tl.int64) * page_stride + in_page
                _write_window(
                    end - 1, start, position, x, x_stride, channel, mask, ring, ring_mask, ring_out, mask, RING, K
                )


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    conv_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """silu(depthwise causal convolution) over packed sequences, continuing from and leaving a window of inputs.

    x: [T, C] fp32, bf16 or fp16, rows contiguous.
    weight: [C, K] contiguous, K from 2 to 4; the last column meets the newest input.
    bias: [C] or None.
    cu_seqlens: int32 [R+1], packed row where each sequence starts.
    seq_starts: int32 [R], absolute position of each sequence's first row.
    conv_cache: [num_pages, K, channels_per_page], rings of inputs (position p in slot p % K), written; contiguous but
        for dim 0.
    initial_pages, final_pages: int32 [R, Nc], where windows are read (-1: zeros) and written (-1: not); they may be
        the same pages of the same sequence.
    checkpoint_rows: int32 [S], and checkpoint_pages: int32 [S, Nc]: the window after that packed row goes there too.
    out: [T, C] contiguous, dtype of x, written; None makes it.
    Returns out. Sums are fp32.
    """
    num_tokens, channels = x.shape
    num_sequences = cu_seqlens.numel() - 1
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_sequences == 0 or channels == 0:
        return out
    if conv_cache is None:
        initial_pages = final_pages = checkpoint_rows = checkpoint_pages = None
    if checkpoint_rows is not None and checkpoint_rows.numel() == 0:
        checkpoint_rows = checkpoint_pages = None
    channels_per_page = channels if conv_cache is None else conv_cache.shape[2]
    pages, last_page = divmod(channels, channels_per_page)
    blocks = pages * triton.cdiv(channels_per_page, CHANNELS) + triton.cdiv(last_page, CHANNELS)
    # The most tiles that the sequences can have: their lengths are on the device, and reading them would wait for it.
    tiles = num_tokens // TOKENS + num_sequences
    causal_conv1d_kernel[(tiles, blocks)](
        x,
        weight,
        bias,
        out,
        cu_seqlens,
        seq_starts,
        conv_cache,
        initial_pages,
        final_pages,
        checkpoint_rows,
        checkpoint_pages,
        num_sequences,
        0 if checkpoint_rows is None else checkpoint_rows.numel(),
        x.stride(0),
        out.stride(0),
        0 if conv_cache is None else conv_cache.stride(0),
        0 if initial_pages is None else initial_pages.stride(0),
        0 if final_pages is None else final_pages.stride(0),
        0 if checkpoint_pages is None else checkpoint_pages.stride(0),
        CHANNELS=channels,
        CHANNELS_PER_PAGE=channels_per_page,
        K=weight.shape[1],
        TOKENS=TOKENS,
        BLOCK_C=CHANNELS,
        BLOCK_LIST=LIST_BLOCK,
        num_warps=1,
    )
    return out
