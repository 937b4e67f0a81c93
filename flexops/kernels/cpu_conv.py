"""Mamba-2's causal convolution on a CPU, and the ring of inputs that it leaves behind; threads share channels."""

import torch
from torch import Tensor

from flexops.kernels import reference
from flexops.kernels.cpu_launch import code_of, kernel, next_part, table_of, unpack, vector_of
from flexops.kernels.cpu_simd import (
    F32,
    LANES,
    PAD,
    clear_bytes,
    fma,
    function,
    get_f32,
    get_i32,
    load,
    put_f32,
    read_row,
    scratch,
    silu,
    store,
    write_row,
)

_CHANNELS = 256  # channels that a thread takes at a time


@function
def stage_weights(weights, pitch, source, code, first, count, width, spare):
    """weight [C, K] of channels `first` .. `first + count` to [K, pitch] in scratch; spare: 16 * K floats."""
    for start in range(0, count, LANES):
        number = min(LANES, count - start)
        read_row(spare, source + (first + start) * width * code, code, number * width)
        for k in range(width):
            for c in range(number):
                put_f32(weights, k * pitch + start + c, get_f32(spare, c * width + k))


@function
def read_window(ring, pitch, cache, page, table, per_page, first, count, width, code):
    """Channels `first` .. `first + count` of a request's window to [K, pitch] in scratch; zeros without pages."""
    if table == 0 or get_i32(table, 0) < 0:
        for k in range(width):
            clear_bytes(ring + k * pitch * F32, count * F32)
        return
    done = 0
    while done < count:
        offset = (first + done) % per_page
        run = min(per_page - offset, count - done)
        home = cache + (get_i32(table, (first + done) // per_page) * page + offset) * code
        for k in range(width):
            read_row(ring + (k * pitch + done) * F32, home + k * per_page * code, code, run)
        done += run


@function
def write_window(ring, pitch, cache, page, table, before, newest, per_page, first, count, width, code):
    """The inverse of `_read_window`; where page and page `before` are the same, only the newest input is written."""
    if table == 0 or get_i32(table, 0) < 0:
        return
    done = 0
    while done < count:
        index, offset = (first + done) // per_page, (first + done) % per_page
        run = min(per_page - offset, count - done)
        number = get_i32(table, index)
        home = cache + (number * page + offset) * code
        same = before != 0 and get_i32(before, index) == number
        for k in range(width):
            if not same or k == newest:
                write_row(home + k * per_page * code, code, ring + (k * pitch + done) * F32, run)
        done += run


@function
def convolve(out, ring, weights, bias, pitch, count, width, newest):
    """silu(bias + sum of weights times inputs, the oldest first)."""
    for i in range(0, count, LANES):
        total, slot = load(bias, i), newest
        for k in range(width):
            slot = slot + 1 if slot + 1 < width else 0
            total = fma(load(weights, k * pitch + i), load(ring, slot * pitch + i), total)
        store(out, i, silu(total))


@function
def next_stop(checkpoints, number, first, end):
    """The end of the rows from `first` on that can run before a checkpoint must be written."""
    for s in range(number):
        row = get_i32(checkpoints, s)
        if first <= row < end:
            end = row + 1
    return end


@kernel(24)
def _causal_conv1d(arguments):
    x, x_row, code, weight, weight_code, bias, bias_code, cu_seqlens, seq_starts, cache = unpack(arguments, 0, 10)
    page, per_page, initial, initial_row, final, final_row, rows, number, pages, pages_row = unpack(arguments, 10, 10)
    out, requests, channels, width = unpack(arguments, 20, 4)
    pitch = _CHANNELS + PAD
    ring, weights, spare = scratch(width * pitch), scratch(width * pitch), scratch(LANES * width + PAD)
    offset, row = scratch(pitch), scratch(pitch)
    blocks = (channels + _CHANNELS - 1) // _CHANNELS
    part = next_part(arguments)
    while part < requests * blocks:
        r, first = part // blocks, part % blocks * _CHANNELS
        count = min(_CHANNELS, channels - first)
        stage_weights(weights, pitch, weight, weight_code, first, count, width, spare)
        clear_bytes(offset, pitch * F32)
        if bias != 0:
            read_row(offset, bias + first * bias_code, bias_code, count)
        table = initial + r * initial_row * 4 if initial != 0 else 0
        read_window(ring, pitch, cache, page, table, per_page, first, count, width, code)
        t, end = get_i32(cu_seqlens, r), get_i32(cu_seqlens, r + 1)
        newest = get_i32(seq_starts, r) % width
        while t < end:
            stop = next_stop(rows, number, t, end)
            while t < stop:
                read_row(ring + newest * pitch * F32, x + (t * x_row + first) * code, code, count)
                convolve(row, ring, weights, offset, pitch, count, width, newest)
                write_row(out + (t * channels + first) * code, code, row, count)
                newest = newest + 1 if newest + 1 < width else 0
                t += 1
            for s in range(number):
                if get_i32(rows, s) == t - 1:
                    table = pages + s * pages_row * 4
                    write_window(ring, pitch, cache, page, table, 0, 0, per_page, first, count, width, code)
        if final != 0:
            table = final + r * final_row * 4
            write_window(ring, pitch, cache, page, table, 0, 0, per_page, first, count, width, code)
        part = next_part(arguments)


def cache_arguments(
    cache: Tensor | None,
    per_page: int,
    initial_pages: Tensor | None,
    final_pages: Tensor | None,
    checkpoint_rows: Tensor | None,
    checkpoint_pages: Tensor | None,
) -> tuple[int, ...]:
    """The arguments that name a cache and its tables; 0 for each that is absent. per_page: of channels or heads."""
    if cache is None:
        return (0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    rows, pages = checkpoint_rows, checkpoint_pages
    saved = (0, 0, 0, 0) if rows is None or pages is None else (rows.data_ptr(), rows.numel(), *table_of(pages))
    return (
        cache.data_ptr(),
        cache.stride(0),
        per_page,
        *table_of(initial_pages),
        *table_of(final_pages),
        *saved,
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
    """See `reference.causal_conv1d`."""
    codes = code_of(x, weight, bias)
    if codes is None:
        return reference.causal_conv1d(
            *(x, weight, bias, cu_seqlens, seq_starts, conv_cache, initial_pages, final_pages),
            *(checkpoint_rows, checkpoint_pages, out),
        )
    out = torch.empty_like(x) if out is None else out
    per_page = 1 if conv_cache is None else conv_cache.shape[2]
    _causal_conv1d(
        8 * out.nbytes,
        *(x.data_ptr(), x.stride(0), codes[0], weight.data_ptr(), codes[1], *vector_of(bias, codes[2])),
        *(cu_seqlens.data_ptr(), seq_starts.data_ptr()),
        *cache_arguments(conv_cache, per_page, initial_pages, final_pages, checkpoint_rows, checkpoint_pages),
        *(out.data_ptr(), cu_seqlens.numel() - 1, *weight.shape),
    )
    return out
