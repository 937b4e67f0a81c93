"""`state_update` in Triton: one decode token of the Mamba-2 mixer between its two projections, one launch.

    xBC' = silu(conv(window, xBC)),  h = exp(dt A) h + dt x B^T,  y = (h C + D x) silu(z)      (Eq. 2)
A program takes some heads of one request, one after the other. B and C of a group are convolved by every program of
the group, but written to the window by one. No program of the launch reads a slot that another writes: the new input
goes to slot position % K, which is never read, because its input comes from xBC; the other slots are written only
where the window moves to other pages. The state goes through registers once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .causal_conv1d import silu
from .ssd_scan import softplus

TILE = 8192  # numbers of state in the registers of a program: 64 per thread
MIN_PROGRAMS = 512  # below, a program takes fewer heads
MAX_HEADS = 4  # heads of a program: what it reads of B and C is shared by them


@triton.jit
def _pages_of(table, first, channel, mask, COUNT: tl.constexpr, CHANNELS_PER_PAGE: tl.constexpr):
    """The page of each of COUNT channels from `first`: one of two where they cannot span more, else looked up."""
    index = channel // CHANNELS_PER_PAGE
    if COUNT <= CHANNELS_PER_PAGE + 1:
        low = tl.load(table + first // CHANNELS_PER_PAGE)
        high = tl.load(table + (first + COUNT - 1) // CHANNELS_PER_PAGE)
        page = tl.where(index == first // CHANNELS_PER_PAGE, low, high)
    else:
        page = tl.load(table + index, mask=mask, other=-1)
    return page


@triton.jit
def _conv_step(
    first,
    is_writer,
    request,
    position,
    xBC,
    xBC_stride,
    conv_weight,
    conv_bias,
    conv_cache,
    conv_pages_in,
    conv_pages_out,
    page_stride,
    in_stride,
    out_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
):
    """COUNT convolved channels of one request from `first`, in fp32, rounded to the dtype of xBC.

    The writer moves their window on.
    """
    channel = first + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < COUNT
    in_page = channel % CHANNELS_PER_PAGE
    page_in = _pages_of(conv_pages_in + request * in_stride, first, channel, mask, COUNT, CHANNELS_PER_PAGE)
    page_out = _pages_of(conv_pages_out + request * out_stride, first, channel, mask, COUNT, CHANNELS_PER_PAGE)
    window_in = conv_cache + page_in.to(tl.int64) * page_stride + in_page
    window_out = conv_cache + page_out.to(tl.int64) * page_stride + in_page
    may_write = mask & (page_out >= 0) & is_writer
    moves = may_write & (page_in != page_out)

    acc = tl.zeros(channel.shape, tl.float32)
    if conv_bias is not None:
        acc = tl.load(conv_bias + channel, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K - 1):  # from the oldest input
        slot = (position + 1 + k) % K * CHANNELS_PER_PAGE
        old = tl.load(window_in + slot, mask=mask & (page_in >= 0), other=0.0)
        acc += tl.load(conv_weight + channel * K + k, mask=mask, other=0.0).to(tl.float32) * old.to(tl.float32)
        tl.store(window_out + slot, old, mask=moves)
    new = tl.load(xBC + request * xBC_stride + channel, mask=mask, other=0.0)
    acc += tl.load(conv_weight + channel * K + K - 1, mask=mask, other=0.0).to(tl.float32) * new.to(tl.float32)
    slot = position % K * CHANNELS_PER_PAGE
    tl.store(window_out + slot, new.to(conv_cache.dtype.element_ty), mask=may_write)
    return silu(acc).to(xBC.dtype.element_ty).to(tl.float32)


@triton.jit
def state_update_tile(
    program,
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
    out,
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
    """Program number `program`: `heads` heads of one group and request, in tiles [BLOCK_P, BLOCK_N] of their state.

    heads is a number of the launch, not of the code: however many heads a program takes, a head gives the same bits.
    """
    programs = H // heads
    request = tl.cast(program // programs, tl.int64)
    first_head = program % programs * heads
    group = first_head // HEADS_PER_GROUP
    n = tl.arange(0, BLOCK_N)
    if tl.load(state_pages_out + request * state_out_stride) < 0:
        for head in range(first_head, first_head + heads):
            tl.store(sums + request * H + head, 0.0)
            for first in range(0, P, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                zeros = tl.zeros([BLOCK_P], out.dtype.element_ty)
                tl.store(out + request * (H * P) + head * P + p, zeros, mask=p < P)
        return

    position = tl.load(positions + request)
    leads_group = first_head % HEADS_PER_GROUP == 0
    first_B = H * P + group * N
    B = _conv_step(
        first_B,
        leads_group,
        request,
        position,
        xBC,
        xBC_stride,
        conv_weight,
        conv_bias,
        conv_cache,
        conv_pages_in,
        conv_pages_out,
        conv_page_stride,
        conv_in_stride,
        conv_out_stride,
        N,
        BLOCK_N,
        CHANNELS_PER_PAGE,
        K,
    )
    C = _conv_step(
        first_B + (H // HEADS_PER_GROUP) * N,
        leads_group,
        request,
        position,
        xBC,
        xBC_stride,
        conv_weight,
        conv_bias,
        conv_cache,
        conv_pages_in,
        conv_pages_out,
        conv_page_stride,
        conv_in_stride,
        conv_out_stride,
        N,
        BLOCK_N,
        CHANNELS_PER_PAGE,
        K,
    )
    i = tl.arange(0, BLOCK_X)
    for head in range(first_head, first_head + heads):
        step = tl.load(dt + request * dt_stride + head).to(tl.float32)
        if dt_bias is not None:
            step += tl.load(dt_bias + head).to(tl.float32)
        step = softplus(step)
        decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * step)
        skip = 0.0
        if D is not None:
            skip = tl.load(D + head).to(tl.float32)
        page_in = tl.load(state_pages_in + request * state_in_stride + head // HEADS_PER_PAGE)
        page_out = tl.load(state_pages_out + request * state_out_stride + head // HEADS_PER_PAGE)
        in_page = tl.cast(head % HEADS_PER_PAGE, tl.int64) * (P * N)
        state_in = state_cache + page_in.to(tl.int64) * state_page_stride + in_page
        state_out = state_cache + page_out.to(tl.int64) * state_page_stride + in_page
        xs = _conv_step(
            head * P,
            True,
            request,
            position,
            xBC,
            xBC_stride,
            conv_weight,
            conv_bias,
            conv_cache,
            conv_pages_in,
            conv_pages_out,
            conv_page_stride,
            conv_in_stride,
            conv_out_stride,
            P,
            BLOCK_X,
            CHANNELS_PER_PAGE,
            K,
        )
        gates = silu(tl.load(z + request * z_stride + head * P + i, mask=i < P, other=0.0).to(tl.float32))
        sum_squares = 0.0
        for first in range(0, P, BLOCK_P):
            p = first + tl.arange(0, BLOCK_P)
            tile = p[:, None] * N + n[None, :]
            mask = (p < P)[:, None] & (n < N)[None, :]
            state = tl.load(state_in + tile, mask=mask & (page_in >= 0), other=0.0)
            x = tl.gather(xs, p, 0)
            state = state * decay + (step * x)[:, None] * B[None, :]
            tl.store(state_out + tile, state, mask=mask & (page_out >= 0))
            y = tl.sum(state * C[None, :], axis=1) + skip * x
            y *= tl.gather(gates, p, 0)
            tl.store(out + request * (H * P) + head * P + p, y.to(out.dtype.element_ty), mask=p < P)
            sum_squares += tl.sum(y * y)
        tl.store(sums + request * H + head, sum_squares)


@triton.jit(do_not_specialize=["heads"])
def state_update_kernel(
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
    out,
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
    """One `state_update_tile` per program."""
    state_update_tile(
        tl.program_id(0),
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
        out,
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


def heads_per_program(num_requests: int, num_heads: int, n_groups: int) -> int:
    """How many heads one program takes: a divisor of a group's heads, fewer where the launch would be small."""
    heads_per_group = num_heads // n_groups
    fitting = [k for k in range(1, MAX_HEADS + 1) if heads_per_group % k == 0]
    return max((k for k in fitting if num_requests * num_heads // k >= MIN_PROGRAMS), default=1)


def update_results(xBC: Tensor, z: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what `state_update` returns."""
    out = torch.empty(z.shape, dtype=xBC.dtype, device=xBC.device)
    return out, torch.empty(dt.shape, dtype=torch.float32, device=xBC.device)


def update_constants(
    xBC: Tensor, dt: Tensor, conv_weight: Tensor, conv_cache: Tensor, state_cache: Tensor
) -> dict[str, int]:
    """The constants of `state_update_tile`."""
    num_heads, (heads_per_page, head_dim, d_state) = dt.shape[1], state_cache.shape[1:]
    n_groups = (xBC.shape[1] - num_heads * head_dim) // (2 * d_state)
    block_n = triton.next_power_of_2(d_state)
    return {
        "H": num_heads,
        "P": head_dim,
        "N": d_state,
        "HEADS_PER_GROUP": num_heads // n_groups,
        "HEADS_PER_PAGE": heads_per_page,
        "CHANNELS_PER_PAGE": conv_cache.shape[2],
        "K": conv_weight.shape[1],
        "BLOCK_X": max(128, triton.next_power_of_2(head_dim)),
        "BLOCK_P": min(triton.next_power_of_2(head_dim), TILE // block_n),
        "BLOCK_N": block_n,
    }


def state_update(
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
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One decode token of the Mamba-2 mixer per request, between its two projections (Eq. 2).

    xBC: [R, C] with C = H*P + 2*G*N (x, then B, then C), fp32, bf16 or fp16, contiguous but for dim 0.
    z: [R, H*P], and dt: [R, H]: contiguous but for dim 0.
    conv_weight: [C, K] contiguous, K from 2 to 4; conv_bias: [C] or None.
    A_log: [H]; D, dt_bias: [H] or None.
    positions: int32 [R], absolute position of the token.
    conv_cache: [num_pages, K, channels_per_page] and state_cache: fp32 [num_pages, heads_per_page, P, N], contiguous
        but for dim 0, written.
    conv_pages_in, conv_pages_out: int32 [R, Nc], and state_pages_in, state_pages_out: int32 [R, Ns]: where window and
        state are read (-1: zeros) and written; the same pages of the same request update in place. A request whose
        first state_pages_out is -1 is skipped: nothing is written, its results are zero.
    out: [R, H*P] in the dtype of xBC and fp32 [R, H], contiguous, written; None makes them.
    Returns out: y * silu(z) and the sums of its squares per head, for `finish_gated_norm`. Arithmetic is fp32;
    convolved channels are rounded to the dtype of xBC, as in prefill.
    """
    num_requests, num_heads = dt.shape
    y, sums = out or update_results(xBC, z, dt)
    if num_requests == 0:
        return y, sums
    constants = update_constants(xBC, dt, conv_weight, conv_cache, state_cache)
    heads = heads_per_program(num_requests, num_heads, num_heads // constants["HEADS_PER_GROUP"])
    state_update_kernel[(num_requests * num_heads // heads,)](
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
        y,
        sums,
        heads,
        *(t.stride(0) for t in (xBC, z, dt, conv_cache, conv_pages_in, conv_pages_out)),
        *(t.stride(0) for t in (state_cache, state_pages_in, state_pages_out)),
        **constants,
        num_warps=4,
    )
    return y, sums
