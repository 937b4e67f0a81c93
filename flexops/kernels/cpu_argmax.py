"""The most likely token of each row of logits on a CPU: one pass, without the fp32 copy that numpy needs of bf16."""

import math

import torch
from torch import Tensor

from flexops.kernels.cpu_launch import code_of, kernel, next_part, unpack
from flexops.kernels.cpu_simd import (
    LANES,
    PAD,
    fma,
    function,
    get,
    load,
    max_lanes,
    maximum,
    only_first,
    put_i32,
    read_row,
    scratch,
    splat,
    store,
    sum_lanes,
)

_PIECE = 1024  # elements that are compared at a time


@function
def _first_of_any(row, code, count):
    """The first NaN, or without one the first of the largest."""
    place, best = 0, get(row, 0, code)
    for i in range(count):
        value = get(row, i, code)
        if value != value:
            return i
        if value > best:
            place, best = i, value
    return place


@kernel(6)
def _argmax(arguments):
    x, x_row, code, rows, count, out = unpack(arguments, 0, 6)
    piece = scratch(_PIECE)
    part = next_part(arguments)
    while part < rows:
        row = x + part * x_row
        start, best, zeros = 0, -math.inf, splat(0.0)
        for i in range(0, count, _PIECE):
            here = min(_PIECE, count - i)
            read_row(piece, row + i * code, code, here)
            if here < _PIECE:
                last = (here - 1) & -LANES
                store(piece, last, only_first(load(piece, last), here - last, -math.inf))
            top0, top1 = splat(-math.inf), splat(-math.inf)
            top2, top3 = splat(-math.inf), splat(-math.inf)
            for j in range(0, here & -PAD, PAD):
                a, b, c, d = load(piece, j), load(piece, j + 16), load(piece, j + 32), load(piece, j + 48)
                top0, top1, top2, top3 = maximum(a, top0), maximum(b, top1), maximum(c, top2), maximum(d, top3)
                zeros = fma((a + b) + (c + d), splat(0.0), zeros)
            for j in range(here & -PAD, here, LANES):
                value = load(piece, j)
                top0, zeros = maximum(value, top0), fma(value, splat(0.0), zeros)
            top = max_lanes(maximum(maximum(top0, top1), maximum(top2, top3)))
            if top > best:
                start, best = i, top
        if sum_lanes(zeros) == 0:
            place = start
            while get(row, place, code) != best:
                place += 1
        else:  # a NaN or an infinity
            place = _first_of_any(row, code, count)
        put_i32(out, part, place)
        part = next_part(arguments)


def argmax(x: Tensor) -> Tensor | None:
    """The place of the first of the largest of each row, of the first NaN where there is one.

    x: [rows, columns] fp32 or bf16, at least one column; rows may be strided.
    Returns int32 [rows]; None for another dtype.
    """
    codes = code_of(x)
    if codes is None:
        return None
    rows, columns = x.shape
    out = torch.empty(rows, dtype=torch.int32)
    size = x.element_size()
    _argmax(rows * columns * size, x.data_ptr(), x.stride(0) * size, codes[0], rows, columns, out.data_ptr())
    return out
