"""`ssd_scan` in Triton: Mamba-2's scan in chunks that end at absolute multiples of chunk_size, two launches.

With a_t the sum of dt A from the start of the chunk to t, never positive, and S the state before the chunk:
    S' = exp(a_last) S + sum_s dt_s exp(a_last - a_s) x_s B_s^T
    y_t = exp(a_t) S C_t + sum_{s<=t} dt_s exp(a_t - a_s) (C_t . B_s) x_s + D x_t
1. `ssd_states_kernel` walks each sequence once, a tile of one head's state in registers, and leaves the state before
   every chunk: a scan that is cut at a chunk end and resumed from its state goes through the same numbers.
2. `ssd_outputs_kernel` computes all outputs in parallel.
Both go through a chunk in blocks of BLOCK_T rows, within which a_t is the sum of two floats, high + low: differences
of large sums stay exact to fp32, and no exponent is positive. States are fp32 throughout; bf16 tensor cores multiply
fp32 numbers exactly, as three bf16 parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal_conv1d import LIST_BLOCK, count_between

BLOCK_STATE = 64  # head dim and state size of a tile of ssd_states_kernel, at most
BLOCK_HEAD = 128  # head dim of a tile of ssd_outputs_kernel, at most


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(e) for e = exp(-|x|), to a few ulp: steps dt are small numbers in the lower tail.

    tl.exp(y) is 2^(y log2 e) and loses a bit whenever |y| doubles, so the whole powers of 2 are taken out first.
    log1p(e) = 2 atanh(s) = e - s (e - 2 s^2 (1/3 + s^2 / 5 + ...)) for s = e / (2 + e) <= 1/3.
    """
    y = -tl.abs(x)
    y = tl.where(y < -100.0, -100.0, y)
    whole = tl.floor(y * 1.4426950408889634 + 0.5)
    e = tl.exp2(whole) * tl.exp((y - whole * 0.693359375) + whole * 2.12194440e-4)
    s = e / (2.0 + e)
    q = s * s
    series = q * (2.0 / 17.0) + 2.0 / 15.0
    for k in tl.static_range(6):
        series = series * q + 2.0 / (13 - 2 * k)
    return tl.maximum(x, 0.0) + (e - s * (e - q * series))


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b for two operands of one dtype."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _dot_exact(a, b, acc):
    """acc + a @ b for fp32 a; a bf16 b meets the three bf16 parts of a, whose products with it are exact in fp32."""
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = _dot(low, b, acc)
        acc = _dot(middle, b, acc)
        acc = _dot(high, b, acc)
    else:
        acc = _dot(a, b, acc)
    return acc


@triton.jit
def _load(base, row, column, mask):
    """A tile whose rows and columns are given as offsets, one along each dim; 0 where the mask is false."""
    return tl.load(base + row + column, mask=mask, other=0.0)


@triton.jit
def _place_of(value, values, num_values, BLOCK: tl.constexpr):
    """The place of `value` in an int32 list that holds it once, or not at all (-1)."""
    place = -1
    for first in range(0, num_values, BLOCK):
        i = first + tl.arange(0, BLOCK)
        found = (tl.load(values + i, mask=i < num_values, other=0) == value) & (i < num_values)
        place = tl.maximum(place, tl.max(tl.where(found, i, -1)))
    return place


@triton.jit
def _state_pointers(state_cache, page_pointer, page_stride, in_page, mask):
    """Pointers to a tile of a state, the number of whose page is at page_pointer, and where they may be used."""
    page = tl.load(page_pointer)
    return state_cache + tl.cast(page, tl.int64) * page_stride + in_page, mask & (page >= 0)


@triton.jit
def _chunks_before(sequence, cu_seqlens, seq_starts, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """How many chunks the sequences before this one have."""
    total = 0
    for first in range(0, sequence, BLOCK):
        i = first + tl.arange(0, BLOCK)
        exists = i < sequence
        length = tl.load(cu_seqlens + i + 1, mask=exists, other=0) - tl.load(cu_seqlens + i, mask=exists, other=0)
        offset = tl.load(seq_starts + i, mask=exists, other=0) % CHUNK
        total += tl.sum(tl.where(length > 0, (offset + length + CHUNK - 1) // CHUNK, 0))
    return total


@triton.jit
def ssd_states_kernel(
    x,
    dt,
    A_log,
    B,
    dt_bias,
    cu_seqlens,
    seq_starts,
    state_cache,
    initial_pages,
    final_pages,
    checkpoint_rows,
    checkpoint_pages,
    steps,
    states,
    chunks,
    num_tokens,
    num_sequences,
    num_checkpoints,
    x_stride,
    dt_stride,
    B_stride,
    page_stride,
    initial_stride,
    final_stride,
    checkpoint_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
):
    """A tile [BLOCK_P, BLOCK_N] of one head's state along one sequence.

    Leaves for the outputs:
    steps: fp32 [4, H, T], dt_t after softplus; dt_t exp(a_last - a_t), to the end of its block; a_t from the start of
        its block, high and low.
    states: [chunks, H, P, N], the state before each chunk.
    chunks: int32 [1 + chunks, 3], first their number in the batch; then of each its first row, the row after its
        last, and how far into its chunk of the grid it starts.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P * tiles_n
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % H
    sequence = tl.program_id(0) // tiles // H
    p = (tile // tiles_n) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_head = p[:, None] * N + n[None, :]
    mask = (p < P)[:, None] & (n < N)[None, :]
    in_page = (head % HEADS_PER_PAGE) * (P * N) + in_head
    page_index = head // HEADS_PER_PAGE
    group = (head // HEADS_PER_GROUP) * N

    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    position = tl.load(seq_starts + sequence)
    row_0 = start - position  # packed row of absolute position 0, which need not exist
    chunk_0 = _chunks_before(sequence, cu_seqlens, seq_starts, CHUNK, BLOCK_LIST) - position // CHUNK
    first_block = position // BLOCK_T
    end_block = tl.where(length > 0, (position + length + BLOCK_T - 1) // BLOCK_T, first_block)
    if (tl.program_id(0) % (tiles * H) == 0) & (sequence == num_sequences - 1):
        count = tl.where(length > 0, chunk_0 + (position + length + CHUNK - 1) // CHUNK, chunk_0 + position // CHUNK)
        tl.store(chunks, count)
    num_wanted = 0
    if checkpoint_rows is not None:
        num_wanted = count_between(start, start + length, checkpoint_rows, num_checkpoints, BLOCK_LIST)

    A = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head).to(tl.float32)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if initial_pages is not None:
        pages = initial_pages + tl.cast(sequence, tl.int64) * initial_stride
        pointers, there = _state_pointers(state_cache, pages + page_index, page_stride, in_page, mask)
        state = tl.load(pointers, mask=there, other=0.0)

    for block in range(first_block, end_block):
        first = block * BLOCK_T
        t = first + tl.arange(0, BLOCK_T)
        exists = (t >= position) & (t < position + length)
        row = tl.cast(row_0 + t, tl.int64)
        xs = _load(x, row[None, :] * x_stride, (head * P + p)[:, None], exists[None, :] & (p < P)[:, None])
        Bs = _load(B, row[:, None] * B_stride, (group + n)[None, :], exists[:, None] & (n < N)[None, :])
        step = softplus(tl.load(dt + row * dt_stride + head, mask=exists, other=0.0).to(tl.float32) + bias)
        step = tl.where(exists, step, 0.0)
        a = tl.cumsum((step * A).to(tl.float64))
        a_last = tl.sum((step * A).to(tl.float64))

        if (first % CHUNK == 0) | (block == first_block):  # a chunk begins, with the state of the one before
            chunk = tl.cast(chunk_0 + first // CHUNK, tl.int64)
            tl.store(states + (chunk * H + head) * (P * N) + in_head, state.to(states.dtype.element_ty), mask=mask)
            if checkpoint_rows is not None:
                if (num_wanted > 0) & (block > first_block):
                    place = _place_of(row_0 + first - 1, checkpoint_rows, num_checkpoints, BLOCK_LIST)
                    if place >= 0:
                        pages = checkpoint_pages + tl.cast(place, tl.int64) * checkpoint_stride
                        pointers, there = _state_pointers(state_cache, pages + page_index, page_stride, in_page, mask)
                        tl.store(pointers, state, mask=there)
            if tl.program_id(0) % (tiles * H) == 0:
                begin = tl.maximum(position, first)
                tl.store(chunks + (1 + chunk) * 3, row_0 + begin)
                grid_end = (first // CHUNK + 1) * CHUNK
                tl.store(chunks + (1 + chunk) * 3 + 1, row_0 + tl.minimum(position + length, grid_end))
                tl.store(chunks + (1 + chunk) * 3 + 2, begin % CHUNK)
        weight = step * tl.exp(tl.minimum((a_last - a).to(tl.float32), 0.0))
        if tile == 0:
            high = a.to(tl.float32)
            own = steps + tl.cast(head, tl.int64) * num_tokens + row
            plane = tl.cast(num_tokens, tl.int64) * H
            tl.store(own, step, mask=exists)
            tl.store(own + plane, weight, mask=exists)
            tl.store(own + 2 * plane, high, mask=exists)
            tl.store(own + 3 * plane, (a - high.to(tl.float64)).to(tl.float32), mask=exists)
        if x.dtype.element_ty == tl.float16:  # fp16 has not the range of the products
            Bs = Bs.to(tl.float32)
        state = _dot_exact(xs.to(tl.float32) * weight[None, :], Bs, state * tl.exp(a_last.to(tl.float32)))

    if checkpoint_rows is not None:
        if num_wanted > 0:
            place = _place_of(start + length - 1, checkpoint_rows, num_checkpoints, BLOCK_LIST)
            if place >= 0:
                pages = checkpoint_pages + tl.cast(place, tl.int64) * checkpoint_stride
                pointers, there = _state_pointers(state_cache, pages + page_index, page_stride, in_page, mask)
                tl.store(pointers, state, mask=there)
    if final_pages is not None:
        pages = final_pages + tl.cast(sequence, tl.int64) * final_stride
        pointers, there = _state_pointers(state_cache, pages + page_index, page_stride, in_page, mask)
        tl.store(pointers, state, mask=there)


@triton.jit
def _scores(
    Cs,
    C,
    B,
    row,
    exists,
    row_j,
    exists_j,
    C_stride,
    B_stride,
    group,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """C_t . B_s of the rows t `row` and s `row_j`; Cs holds the rows of C where they fit in one block of N."""
    scores = tl.zeros([row.shape[0], row_j.shape[0]], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        if N > BLOCK_N:
            Cs = _load(C, row[:, None] * C_stride, (group + n)[None, :], exists[:, None] & (n < N)[None, :])
        Bs = _load(B, row_j[None, :] * B_stride, (group + n)[:, None], exists_j[None, :] & (n < N)[:, None])
        scores = _dot(Cs.to(COMPUTE), Bs.to(COMPUTE), scores)
    return scores


@triton.jit
def ssd_outputs_kernel(
    x,
    B,
    C,
    D,
    steps,
    states,
    chunks,
    out,
    num_tokens,
    x_stride,
    B_stride,
    C_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Outputs [BLOCK_T, BLOCK_P] of one block of a chunk and one head."""
    tiles_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    blocks: tl.constexpr = CHUNK // BLOCK_T
    tile = tl.program_id(0) % tiles_p
    head = tl.program_id(0) // tiles_p % H
    block = blocks - 1 - tl.program_id(0) // (tiles_p * H) % blocks  # the longest first
    chunk = tl.program_id(0) // (tiles_p * H * blocks)
    if chunk >= tl.load(chunks):
        return
    begin = tl.load(chunks + (1 + chunk) * 3)
    end = tl.load(chunks + (1 + chunk) * 3 + 1)
    offset = tl.load(chunks + (1 + chunk) * 3 + 2)
    row_0 = begin - offset  # packed row of the chunk's place in the grid, which need not exist
    if (row_0 + block * BLOCK_T >= end) | ((block + 1) * BLOCK_T <= offset):
        return

    COMPUTE: tl.constexpr = states.dtype.element_ty
    i = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    in_x = (head * P + p)[None, :]
    mask_p = (p < P)[None, :]
    group = (head // HEADS_PER_GROUP) * N
    own_step = steps + tl.cast(head, tl.int64) * num_tokens
    own_weight = own_step + tl.cast(num_tokens, tl.int64) * H
    own_high = own_weight + tl.cast(num_tokens, tl.int64) * H
    own_low = own_high + tl.cast(num_tokens, tl.int64) * H
    row = row_0 + block * BLOCK_T + i
    exists = (row >= begin) & (row < end)
    row = tl.cast(row, tl.int64)
    Cs = _load(C, row[:, None] * C_stride, (group + n)[None, :], exists[:, None] & (n < N)[None, :])

    # What the state before the chunk gives, then what each block before this one adds; the factor exp(a_t) follows.
    before = states + (tl.cast(chunk, tl.int64) * H + head) * (P * N)
    acc = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        if N > BLOCK_N:
            Cs = _load(C, row[:, None] * C_stride, (group + n)[None, :], exists[:, None] & (n < N)[None, :])
        S = _load(before, p[None, :] * N, n[:, None], mask_p & (n < N)[:, None])
        acc = _dot(Cs.to(COMPUTE), S, acc)
    for j in range(offset // BLOCK_T, block):
        row_j = row_0 + j * BLOCK_T + i
        exists_j = row_j >= begin
        last_j = tl.cast(row_0 + (j + 1) * BLOCK_T - 1, tl.int64)
        row_j = tl.cast(row_j, tl.int64)
        weight = tl.load(own_weight + row_j, mask=exists_j, other=0.0)
        a_last = tl.load(own_high + last_j) + tl.load(own_low + last_j)
        scores = _scores(Cs, C, B, row, exists, row_j, exists_j, C_stride, B_stride, group, N, BLOCK_N, COMPUTE)
        xs = _load(x, row_j[:, None] * x_stride, in_x, exists_j[:, None] & mask_p)
        acc = _dot((scores * weight[None, :]).to(COMPUTE), xs.to(COMPUTE), acc * tl.exp(a_last))

    high = tl.load(own_high + row, mask=exists, other=0.0)
    low = tl.load(own_low + row, mask=exists, other=0.0)
    step = tl.load(own_step + row, mask=exists, other=0.0)
    acc *= tl.exp(high + low)[:, None]
    scores = _scores(Cs, C, B, row, exists, row, exists, C_stride, B_stride, group, N, BLOCK_N, COMPUTE)
    a = tl.minimum((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]), 0.0)
    scores = tl.where(i[:, None] >= i[None, :], scores * tl.exp(a) * step[None, :], 0.0)
    xs = _load(x, row[:, None] * x_stride, in_x, exists[:, None] & mask_p)
    acc = _dot(scores.to(COMPUTE), xs.to(COMPUTE), acc)
    if D is not None:
        acc += tl.load(D + head).to(tl.float32) * xs.to(tl.float32)
    tl.store(out + row[:, None] * (H * P) + in_x, acc.to(out.dtype.element_ty), mask=exists[:, None] & mask_p)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    chunk_size: int,
    state_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mamba-2's selective scan over packed sequences (Eq. 2), continuing from and leaving paged states.

    x: [T, H, P] fp32, bf16 or fp16, contiguous but for dim 0; P a multiple of 8 up to 256.
    dt: [T, H], before bias and softplus, contiguous but for dim 0.
    A_log: [H]; D, dt_bias: [H] or None.
    B, C: [T, G, N] in the dtype of x, contiguous but for dim 0; N from 16 to 256.
    cu_seqlens: int32 [R+1], packed row where each sequence starts.
    seq_starts: int32 [R], absolute position of each sequence's first row.
    chunk_size: a power of two from 16.
    state_cache: fp32 [num_pages, heads_per_page, P, N], written; contiguous but for dim 0.
    initial_pages, final_pages: int32 [R, Ns], where states are read (-1: zero) and written (-1: not); they may be the
        same pages of the same sequence.
    checkpoint_rows: int32 [S], and checkpoint_pages: int32 [S, Ns]: the state after that packed row goes there too,
        if it is the last row of a chunk or of its sequence; nothing is written for other rows.
    out: [T, H, P] contiguous, dtype of x, written; None makes it.
    Returns y = out.  A scan cut at chunk ends and resumed from its states gives the same bits.
    """
    num_tokens, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[1:]
    num_sequences = cu_seqlens.numel() - 1
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_sequences == 0:
        return out
    if state_cache is None:
        initial_pages = final_pages = checkpoint_rows = checkpoint_pages = None
    if checkpoint_rows is not None and checkpoint_rows.numel() == 0:
        checkpoint_rows = checkpoint_pages = None
    # The most chunks that the sequences can have: their lengths are on the device, and reading them would wait for it.
    max_chunks = min(num_tokens, num_tokens // chunk_size + 2 * num_sequences)
    is_bf16 = x.dtype == torch.bfloat16
    steps = x.new_empty(4, num_heads, num_tokens, dtype=torch.float32)
    states_dtype = x.dtype if is_bf16 else torch.float32
    states = x.new_empty(max_chunks, num_heads, head_dim, d_state, dtype=states_dtype)
    chunks = torch.empty(1 + max_chunks, 3, dtype=torch.int32, device=x.device)
    sizes = {
        "H": num_heads,
        "P": head_dim,
        "N": d_state,
        "HEADS_PER_GROUP": num_heads // n_groups,
        "CHUNK": chunk_size,
        "BLOCK_T": min(64 if is_bf16 else 32, chunk_size),
    }
    block_p = min(BLOCK_STATE, max(16, triton.next_power_of_2(head_dim)))
    block_n = min(BLOCK_STATE, triton.next_power_of_2(d_state))
    tiles = triton.cdiv(head_dim, block_p) * triton.cdiv(d_state, block_n)
    ssd_states_kernel[(num_sequences * num_heads * tiles,)](
        x,
        dt,
        A_log,
        B,
        dt_bias,
        cu_seqlens,
        seq_starts,
        state_cache,
        initial_pages,
        final_pages,
        checkpoint_rows,
        checkpoint_pages,
        steps,
        states,
        chunks,
        num_tokens,
        num_sequences,
        0 if checkpoint_rows is None else checkpoint_rows.numel(),
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        0 if state_cache is None else state_cache.stride(0),
        0 if initial_pages is None else initial_pages.stride(0),
        0 if final_pages is None else final_pages.stride(0),
        0 if checkpoint_pages is None else checkpoint_pages.stride(0),
        **sizes,
        HEADS_PER_PAGE=1 if state_cache is None else state_cache.shape[1],
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_LIST=LIST_BLOCK,
        num_warps=4,
        num_stages=3,
    )
    if num_tokens == 0:
        return out
    block_p = min(BLOCK_HEAD, max(16, triton.next_power_of_2(head_dim)))
    tiles = max_chunks * (chunk_size // sizes["BLOCK_T"]) * num_heads * triton.cdiv(head_dim, block_p)
    ssd_outputs_kernel[(tiles,)](
        x,
        B,
        C,
        D,
        steps,
        states,
        chunks,
        out,
        num_tokens,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        **sizes,
        BLOCK_P=block_p,
        BLOCK_N=min(128 if is_bf16 else 32, triton.next_power_of_2(d_state)),
        num_warps=4 if is_bf16 and block_p <= 64 and d_state <= 128 else 8,
        num_stages=2,
    )
    return out
