"""The SSM operators on a CPU: Mamba-2's scan, and the fused update of a decoded token.

The scan is the update of one token, repeated: the same function computes both, so a state has the same bits whether
it was reached in one scan, in several that were cut anywhere, or token by token. Threads share heads.
"""

import torch
from torch import Tensor

from flexops.kernels import reference
from flexops.kernels.cpu_conv import (
    cache_arguments,
    convolve,
    next_stop,
    read_window,
    stage_weights,
    write_window,
)
from flexops.kernels.cpu_launch import code_of, kernel, next_part, table_of, unpack, vector_of
from flexops.kernels.cpu_simd import (
    CACHE_LINE,
    F32,
    LANES,
    PAD,
    clear_bytes,
    exp,
    fma,
    function,
    get,
    get_f32,
    get_i32,
    inline,
    load,
    only_first,
    prefetch,
    put_f32,
    read_row,
    round_row,
    scratch,
    silu,
    softplus,
    splat,
    store,
    sum_lanes,
    sum_rows,
    write_row,
)

_STEPS = 32  # tokens of a scan whose inputs lie in scratch at a time


# --- one token ------------------------------------------------------------------------------------------------


@function
def _step(state, target, pitch, b, c, count, decay, inputs, products):
    """Four rows of a head: h = decay * h + input * b to target, and h * c in 16 lanes to `products`."""
    x0, x1 = splat(get_f32(inputs, 0)), splat(get_f32(inputs, 1))
    x2, x3 = splat(get_f32(inputs, 2)), splat(get_f32(inputs, 3))
    y0, y1, y2, y3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    shrink = splat(decay)
    s1, s2, s3 = state + pitch * F32, state + 2 * pitch * F32, state + 3 * pitch * F32
    t1, t2, t3 = target + pitch * F32, target + 2 * pitch * F32, target + 3 * pitch * F32
    for i in range(0, count, LANES):
        bi, ci = load(b, i), load(c, i)
        h0 = fma(x0, bi, load(state, i) * shrink)
        h1 = fma(x1, bi, load(s1, i) * shrink)
        h2 = fma(x2, bi, load(s2, i) * shrink)
        h3 = fma(x3, bi, load(s3, i) * shrink)
        store(target, i, h0)
        store(t1, i, h1)
        store(t2, i, h2)
        store(t3, i, h3)
        y0, y1, y2, y3 = fma(h0, ci, y0), fma(h1, ci, y1), fma(h2, ci, y2), fma(h3, ci, y3)
    store(products, 0, y0)
    store(products, 16, y1)
    store(products, 32, y2)
    store(products, 48, y3)


@inline
def _fetch(address, count):
    """Have memory brought into the L2 cache."""
    for line in range(0, count, CACHE_LINE):
        prefetch(address + line)


@function
def _load_state(rows, pitch, source, number, count):
    """`number` rows of a state to scratch; zeros where there is none (address 0)."""
    if source == 0:
        clear_bytes(rows, number * pitch * F32)
        return
    for p in range(number):
        read_row(rows + p * pitch * F32, source + p * count * F32, F32, count)


@function
def _save_state(target, rows, pitch, number, count):
    """The inverse of `_load_state`; nothing where there is no target."""
    if target != 0:
        for p in range(number):
            write_row(target + p * count * F32, F32, rows + p * pitch * F32, count)


@inline
def _state_of(cache, page, table, per_page, head, size):
    """The address of a head's state of `size` elements; 0 where the request has no pages."""
    if table == 0 or get_i32(table, 0) < 0:
        return 0
    return cache + (get_i32(table, head // per_page) * page + head % per_page * size) * F32


# --- scan -----------------------------------------------------------------------------------------------------


@kernel(34)
def _ssd_scan(arguments):
    x, x_row, code, dt, dt_row, dt_code, a_log, a_code, b, b_row = unpack(arguments, 0, 10)
    c, c_row, d, d_code, dt_bias, bias_code, cu_seqlens, cache, page, per_page = unpack(arguments, 10, 10)
    initial, initial_row, final, final_row, rows, number, pages, pages_row, out, requests = unpack(arguments, 20, 10)
    heads, dim, groups, d_state = unpack(arguments, 30, 4)
    pitch, width = (d_state + PAD - 1) & -PAD, (dim + PAD - 1) & -PAD
    state, products, inputs = scratch(dim * pitch), scratch(LANES * LANES), scratch(LANES)
    bs, cs, xs, ys = scratch(_STEPS * pitch), scratch(_STEPS * pitch), scratch(_STEPS * width), scratch(_STEPS * width)
    steps, decays = scratch(_STEPS), scratch(_STEPS)
    clear_bytes(products, LANES * LANES * F32)
    clear_bytes(steps, _STEPS * F32)
    part = next_part(arguments)
    while part < requests * heads:
        r, h = part // heads, part % heads
        group = h // (heads // groups)
        rate = exp(splat(get(a_log, h, a_code)))
        bias, skip = splat(get(dt_bias, h, bias_code)), splat(get(d, h, d_code))
        table = initial + r * initial_row * 4 if initial != 0 else 0
        _load_state(state, pitch, _state_of(cache, page, table, per_page, h, dim * d_state), dim, d_state)
        t, end = get_i32(cu_seqlens, r), get_i32(cu_seqlens, r + 1)
        while t < end:
            stop = next_stop(rows, number, t, min(t + _STEPS, end))
            count = stop - t
            for i in range(count):
                read_row(bs + i * pitch * F32, b + ((t + i) * b_row + group * d_state) * code, code, d_state)
                read_row(cs + i * pitch * F32, c + ((t + i) * c_row + group * d_state) * code, code, d_state)
                read_row(xs + i * width * F32, x + ((t + i) * x_row + h * dim) * code, code, dim)
                put_f32(steps, i, get(dt, (t + i) * dt_row + h, dt_code))
            for i in range(0, count, LANES):
                step = softplus(load(steps, i) + bias)
                store(steps, i, step)
                store(decays, i, exp(splat(0.0) - rate * step))
            # sixteen rows of the state stay in the nearest cache while all these tokens pass over them
            for p in range(0, dim, LANES):
                for i in range(count):
                    values = load(xs, i * width + p)
                    store(inputs, 0, splat(get_f32(steps, i)) * values)
                    for q in range(0, min(LANES, dim - p), 4):
                        rows4 = state + (p + q) * pitch * F32
                        bi, ci = bs + i * pitch * F32, cs + i * pitch * F32
                        decay, into = get_f32(decays, i), products + q * LANES * F32
                        _step(rows4, rows4, pitch, bi, ci, d_state, decay, inputs + q * F32, into)
                    store(ys, i * width + p, fma(skip, values, sum_rows(products)))
            for i in range(count):
                write_row(out + ((t + i) * heads + h) * dim * code, code, ys + i * width * F32, dim)
            t = stop
            for s in range(number):
                if get_i32(rows, s) == t - 1:
                    table = pages + s * pages_row * 4
                    _save_state(_state_of(cache, page, table, per_page, h, dim * d_state), state, pitch, dim, d_state)
        if final != 0:
            table = final + r * final_row * 4
            _save_state(_state_of(cache, page, table, per_page, h, dim * d_state), state, pitch, dim, d_state)
        part = next_part(arguments)


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
    """See `reference.ssd_scan`; runs token by token, so chunk_size and seq_starts do not matter."""
    codes = code_of(x, dt, A_log, D, dt_bias)
    if codes is None:
        return reference.ssd_scan(
            *(x, dt, A_log, B, C, D, dt_bias, cu_seqlens, seq_starts, chunk_size),
            *(state_cache, initial_pages, final_pages, checkpoint_rows, checkpoint_pages, out),
        )
    out = torch.empty_like(x) if out is None else out
    per_page = 1 if state_cache is None else state_cache.shape[1]
    _ssd_scan(
        out.numel() * B.shape[2],
        *(x.data_ptr(), x.stride(0), codes[0], dt.data_ptr(), dt.stride(0), codes[1], A_log.data_ptr(), codes[2]),
        *(
            B.data_ptr(),
            B.stride(0),
            C.data_ptr(),
            C.stride(0),
            *vector_of(D, codes[3]),
            *vector_of(dt_bias, codes[4]),
        ),
        cu_seqlens.data_ptr(),
        *cache_arguments(state_cache, per_page, initial_pages, final_pages, checkpoint_rows, checkpoint_pages),
        *(out.data_ptr(), cu_seqlens.numel() - 1, *x.shape[1:], *B.shape[1:]),
    )
    return out


# --- state update ---------------------------------------------------------------------------------------------


@kernel(42)
def _state_update(arguments):
    xbc, xbc_row, code, z, z_row, dt, dt_row, dt_code, weight, weight_code = unpack(arguments, 0, 10)
    bias, bias_code, a_log, a_code, d, d_code, dt_bias, dt_bias_code, positions, width = unpack(arguments, 10, 10)
    windows, window_page, per_page, windows_in, windows_in_row, windows_out, windows_out_row = unpack(arguments, 20, 7)
    states, state_page, heads_per_page, states_in, states_in_row, states_out, states_out_row = unpack(arguments, 27, 7)
    out, sums, requests, heads, dim, groups, d_state, heads_per_part = unpack(arguments, 34, 8)
    channels, inner = heads * dim + 2 * groups * d_state, heads * dim
    pitch, state_pitch = (channels + PAD - 1) & -PAD, (d_state + PAD - 1) & -PAD
    pitch += PAD
    ring, weights = scratch(width * pitch), scratch(width * pitch)
    offset, conv, gate = scratch(pitch), scratch(pitch), scratch(dim + PAD)
    b, c, products, inputs = scratch(state_pitch), scratch(state_pitch), scratch(LANES * LANES), scratch(LANES)
    block, spare = scratch(LANES * state_pitch), scratch(LANES * width + PAD)
    rates, dt_biases, steps, decays = (
        scratch(heads + PAD),
        scratch(heads + PAD),
        scratch(heads + PAD),
        scratch(heads + PAD),
    )
    clear_bytes(products, LANES * LANES * F32)
    clear_bytes(offset, pitch * F32)
    if bias != 0:
        read_row(offset, bias, bias_code, channels)
    stage_weights(weights, pitch, weight, weight_code, 0, channels, width, spare)
    clear_bytes(dt_biases, (heads + PAD) * F32)
    if dt_bias != 0:
        read_row(dt_biases, dt_bias, dt_bias_code, heads)
    read_row(rates, a_log, a_code, heads)
    for i in range(0, heads, LANES):
        store(rates, i, exp(load(rates, i)))
    splits = heads // heads_per_part
    part = next_part(arguments)
    while part < requests * splits:
        r, first_head = part // splits, part % splits * heads_per_part
        end_head = first_head + heads_per_part
        target_pages = states_out + r * states_out_row * 4
        if get_i32(target_pages, 0) < 0:
            clear_bytes(out + (r * heads + first_head) * dim * code, heads_per_part * dim * code)
            clear_bytes(sums + (r * heads + first_head) * F32, heads_per_part * F32)
            part = next_part(arguments)
            continue
        # the convolution of these heads' channels, then of B and C of their groups
        newest = get_i32(positions, r) % width
        before, after = windows_in + r * windows_in_row * 4, windows_out + r * windows_out_row * 4
        per_group = heads // groups
        first_group, end_group = first_head // per_group, (end_head - 1) // per_group + 1
        for span in range(3):
            if span == 0:
                first, count = first_head * dim, heads_per_part * dim
            else:
                first = inner + ((span - 1) * groups + first_group) * d_state
                count = (end_group - first_group) * d_state
            window, shift = ring + first * F32, first * F32
            read_window(window, pitch, windows, window_page, before, per_page, first, count, width, code)
            read_row(window + newest * pitch * F32, xbc + (r * xbc_row + first) * code, code, count)
            convolve(conv + shift, window, weights + shift, offset + shift, pitch, count, width, newest)
            round_row(conv + shift, code, count)
            if span > 0:
                # several parts read these channels; the one that has a group's first head writes them
                skipped = 0 if first_head % per_group == 0 else d_state
                first, count, window = first + skipped, count - skipped, window + skipped * F32
            write_window(
                window, pitch, windows, window_page, after, before, newest, per_page, first, count, width, code
            )
        read_row(steps, dt + (r * dt_row + first_head) * dt_code, dt_code, heads_per_part)
        for i in range(0, heads_per_part, LANES):
            size = softplus(load(steps, i) + load(dt_biases, first_head + i))
            store(steps, i, size)
            store(decays, i, exp(splat(0.0) - load(rates, first_head + i) * size))
        source_pages = states_in + r * states_in_row * 4
        for h in range(first_head, end_head):
            group = h // per_group
            read_row(b, conv + (inner + group * d_state) * F32, F32, d_state)
            read_row(c, conv + (inner + (groups + group) * d_state) * F32, F32, d_state)
            step, decay = get_f32(steps, h - first_head), get_f32(decays, h - first_head)
            skip, total = splat(get(d, h, d_code)), splat(0.0)
            source = _state_of(states, state_page, source_pages, heads_per_page, h, dim * d_state)
            target = _state_of(states, state_page, target_pages, heads_per_page, h, dim * d_state)
            next_head = min(h + 1, end_head - 1)
            following = _state_of(states, state_page, source_pages, heads_per_page, next_head, dim * d_state)
            read_row(gate, z + (r * z_row + h * dim) * code, code, dim)
            for p in range(0, dim, LANES):
                number, place = min(LANES, dim - p), p * d_state * F32
                values = load(conv, h * dim + p)
                store(inputs, 0, splat(step) * values)
                direct = source != 0 and d_state % LANES == 0
                # the sixteen rows behind these: memory is waited for unless it is asked that early
                ahead = source + place + LANES * d_state * F32 if p + LANES < dim else following
                if not direct:
                    _load_state(block, state_pitch, source + place if source != 0 else 0, number, d_state)
                for q in range(0, number, 4):
                    row, into = place + q * d_state * F32, products + q * LANES * F32
                    if direct:
                        _fetch(ahead + q * d_state * F32, 4 * d_state * F32)
                        _step(source + row, target + row, d_state, b, c, d_state, decay, inputs + q * F32, into)
                    else:
                        rows4 = block + q * state_pitch * F32
                        _step(rows4, rows4, state_pitch, b, c, d_state, decay, inputs + q * F32, into)
                if not direct:
                    _save_state(target + place, block, state_pitch, number, d_state)
                gated = fma(skip, values, sum_rows(products)) * silu(load(gate, p))
                store(gate, p, gated)
                gated = only_first(gated, number, 0.0)
                total = fma(gated, gated, total)
            write_row(out + (r * heads + h) * dim * code, code, gate, dim)
            put_f32(sums, r * heads + h, sum_lanes(total))
        part = next_part(arguments)


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
    """See `reference.state_update`."""
    codes = code_of(xBC, dt, conv_weight, conv_bias, A_log, D, dt_bias)
    if codes is None:
        return reference.state_update(
            *(xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions),
            *(conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out, out),
        )
    requests, inner = z.shape
    _, heads_per_page, dim, d_state = state_cache.shape
    heads = inner // dim
    y, sums = out or (torch.empty_like(z), torch.empty((requests, heads), dtype=torch.float32))
    _state_update(
        8 * requests * inner * d_state,
        *(xBC.data_ptr(), xBC.stride(0), codes[0], z.data_ptr(), z.stride(0), dt.data_ptr(), dt.stride(0), codes[1]),
        *(conv_weight.data_ptr(), codes[2], *vector_of(conv_bias, codes[3]), A_log.data_ptr(), codes[4]),
        *(
            *vector_of(D, codes[5]),
            *vector_of(dt_bias, codes[6]),
            positions.data_ptr(),
            conv_weight.shape[1],
        ),
        *(conv_cache.data_ptr(), conv_cache.stride(0), conv_cache.shape[2]),
        *(*table_of(conv_pages_in), *table_of(conv_pages_out)),
        *(state_cache.data_ptr(), state_cache.stride(0), heads_per_page),
        *(*table_of(state_pages_in), *table_of(state_pages_out)),
        *(y.data_ptr(), sums.data_ptr(), requests, heads, dim, (xBC.shape[1] - inner) // (2 * d_state), d_state),
        _heads_per_part(requests, heads),
    )
    return y, sums


def _heads_per_part(requests: int, heads: int) -> int:
    """All heads of a request together, unless there are too few requests to keep the threads busy."""
    threads = torch.get_num_threads()
    if requests >= 4 * threads:
        return heads
    return next(heads // parts for parts in range(min(threads, heads), 0, -1) if heads % parts == 0)
