"""Attention on a CPU: rotary embedding with the paged append, and paged causal attention.

A query row meets the keys in tiles of 64 at absolute positions, one tile after another, with a running maximum. The
arithmetic of a row is a fixed sequence: each score is one sum over head_dim, each output element one sum over the
keys of a tile. Rows are computed together only so that a tile of keys and values, once in cache, serves them all.
So a row has the same bits in a prefill, however it was cut, and as a single decoded token.
"""

import math
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor

from flexops.kernels import reference
from flexops.kernels.cpu_launch import code_of, float_argument, kernel, next_part, unpack
from flexops.kernels.cpu_simd import (
    F32,
    FLOATS,
    INT64,
    LANES,
    PAD,
    broadcast,
    call,
    clear_bytes,
    copy_bytes,
    emits,
    exp,
    function,
    get_f32,
    get_i32,
    get_i64,
    inline,
    interleave,
    load,
    max_lanes,
    maximum,
    only_first,
    pointer_to,
    put_f32,
    read_row,
    scratch,
    splat,
    store,
    store_part,
    sum_lanes,
    write_row,
)

_TILE = 64  # keys
_BLOCK = 64  # rows (queries times heads of a group) that share a tile of keys


# --- rotary embedding and append ------------------------------------------------------------------------------


@function
def _rotate(head, angles, half):
    """The rotary embedding of one head in scratch; angles: cosines, then sines."""
    for i in range(0, half, LANES):
        a, b = load(head, i), load(head, half + i)
        cos, sin = load(angles, i), load(angles, half + i)
        count = min(LANES, half - i)
        store_part(head, i, count, a * cos - b * sin)
        store_part(head, half + i, count, b * cos + a * sin)


@kernel(20)
def _append_kv(arguments):
    q, q_row, q_heads, out, k, k_row, v, v_row, kv_heads, code = unpack(arguments, 0, 10)
    angles, rotary, angles_code, positions, cache, page, page_tokens, slots, tokens, dim = unpack(arguments, 10, 10)
    head, row = scratch(dim + PAD), scratch(rotary + PAD)
    per_part = max(1, 8192 // ((q_heads + 2 * kv_heads) * dim))
    first = next_part(arguments) * per_part
    while first < tokens:
        for t in range(first, min(first + per_part, tokens)):
            if rotary > 0:
                read_row(row, angles + get_i32(positions, t) * rotary * angles_code, angles_code, rotary)
            for h in range(q_heads):
                read_row(head, q + (t * q_row + h * dim) * code, code, dim)
                _rotate(head, row, rotary // 2)
                write_row(out + (t * q_heads + h) * dim * code, code, head, dim)
            slot = get_i64(slots, t) if kv_heads > 0 else -1
            if slot < 0:
                continue
            home = cache + (slot // page_tokens * page + slot % page_tokens * dim) * code
            for h in range(kv_heads):
                read_row(head, k + (t * k_row + h * dim) * code, code, dim)
                _rotate(head, row, rotary // 2)
                write_row(home + h * page_tokens * dim * code, code, head, dim)
                copy_bytes(
                    home + (kv_heads + h) * page_tokens * dim * code, v + (t * v_row + h * dim) * code, dim * code
                )
        first = next_part(arguments) * per_part


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """See `reference.apply_rope`."""
    codes = code_of(x, cos_sin)
    if codes is None:
        return reference.apply_rope(x, cos_sin, positions)
    out, positions = torch.empty_like(x), positions.int()
    tokens, heads, dim = x.shape
    _append_kv(
        2 * out.nbytes,
        *(x.data_ptr(), x.stride(0), heads, out.data_ptr(), 0, 0, 0, 0, 0, codes[0]),
        *(cos_sin.data_ptr(), cos_sin.shape[1], codes[1], positions.data_ptr(), 0, 0, 1, 0, tokens, dim),
    )
    return out


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
    """See `reference.append_kv`."""
    codes = code_of(q, cos_sin)
    if codes is None:
        return reference.append_kv(q, k, v, cos_sin, positions, kv_cache, slot_mapping, out)
    out = torch.empty_like(q) if out is None else out
    tokens, heads, dim = q.shape
    _append_kv(
        4 * out.nbytes,
        *(q.data_ptr(), q.stride(0), heads, out.data_ptr(), k.data_ptr(), k.stride(0)),
        *(v.data_ptr(), v.stride(0), k.shape[1], codes[0]),
        *((0, 0, 0) if cos_sin is None else (cos_sin.data_ptr(), cos_sin.shape[1], codes[1])),
        *(positions.data_ptr(), kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.shape[3]),
        *(slot_mapping.data_ptr(), tokens, dim),
    )
    return out


# --- paged attention ------------------------------------------------------------------------------------------


def _multiply_add(rows: int, vectors: int) -> Any:
    """c[r, :] += a[r, i] * b[i, :] for i = 0, 1, ... in turn, with `rows` x `vectors` of c held in registers.

    Every element of c is one sequence of fused multiply-adds, whatever the block that computes it.
    """

    @emits(types.void, *[types.int64] * 7)
    def multiply_add(b, c, c_row, a, a_row, matrix, matrix_row, count):
        scale = ir.Constant(INT64, F32)

        def element(base, row, pitch, column, to):
            offset = b.add(b.mul(row, pitch), column)
            return b.inttoptr(b.add(base, b.mul(offset, scale)), to.as_pointer())

        places = [(r, v, cgutils.alloca_once(b, FLOATS)) for r in range(rows) for v in range(vectors)]
        lanes = [ir.Constant(INT64, LANES * v) for v in range(vectors)]
        row_numbers = [ir.Constant(INT64, r) for r in range(rows)]
        for r, v, place in places:
            b.store(b.load(element(c, row_numbers[r], c_row, lanes[v], FLOATS), align=F32), place)
        with cgutils.for_range(b, count, intp=INT64) as loop:
            right = [b.load(element(matrix, loop.index, matrix_row, column, FLOATS), align=F32) for column in lanes]
            left = [b.load(element(a, r, a_row, loop.index, ir.FloatType()), align=F32) for r in row_numbers]
            left = [broadcast(b, value) for value in left]
            for r, v, place in places:
                b.store(call(b, "llvm.fma.v16f32", FLOATS, [left[r], right[v], b.load(place)]), place)
        for r, v, place in places:
            b.store(b.load(place), element(c, row_numbers[r], c_row, lanes[v], FLOATS), align=F32)

    return multiply_add


_multiply_add_4x4, _multiply_add_1x4 = _multiply_add(4, 4), _multiply_add(1, 4)
_multiply_add_4x1, _multiply_add_1x1 = _multiply_add(4, 1), _multiply_add(1, 1)


@emits(types.void, *[types.int64] * 4)
def _transpose(b, target, target_row, source, source_row):
    """target[j, i] = source[i, j] for 16 x 16 floats."""
    rows = [
        b.load(pointer_to(b, source, b.mul(ir.Constant(INT64, i), source_row), F32, FLOATS), align=F32)
        for i in range(LANES)
    ]
    # interleaving row i with row i + 8, four times over, moves every element to its transposed place
    for _ in range(4):
        rows = [row for i in range(LANES // 2) for row in interleave(b, rows[i], rows[i + LANES // 2])]
    for i, row in enumerate(rows):
        b.store(row, pointer_to(b, target, b.mul(ir.Constant(INT64, i), target_row), F32, FLOATS), align=F32)


@function
def _stage(keys, values, rows, cache, page, table, page_tokens, value_offset, start, count, dim, pitch, code):
    """Keys `start` .. `start + count` of one head to scratch, transposed to [dim, _TILE]; values to [_TILE, pitch]."""
    done = 0
    while done < count:
        position = start + done
        offset = position % page_tokens
        run = min(page_tokens - offset, count - done)
        home = cache + (get_i32(table, position // page_tokens) * page + offset * dim) * code
        for j in range(done, done + run):
            read_row(rows + j % LANES * pitch * F32, home, code, dim)
            read_row(values + j * pitch * F32, home + value_offset * code, code, dim)
            home += dim * code
            if j % LANES == LANES - 1 or j == count - 1:
                for i in range(0, dim, LANES):
                    _transpose(keys + (i * _TILE + j // LANES * LANES) * F32, _TILE, rows + i * F32, pitch)
        done += run


@function
def _softmax(scores, state, out, dim, count, scale):
    """Turn one row of scores into weights exp(score - maximum) and scale what was summed so far to the new maximum.

    state: the maximum of the row, then from LANES on its sum of weights in 16 lanes.
    """
    s0 = only_first(load(scores, 0) * splat(scale), count, -math.inf)
    s1 = only_first(load(scores, 16) * splat(scale), count - 16, -math.inf)
    s2 = only_first(load(scores, 32) * splat(scale), count - 32, -math.inf)
    s3 = only_first(load(scores, 48) * splat(scale), count - 48, -math.inf)
    before = get_f32(state, 0)
    largest = max_lanes(maximum(maximum(s0, s1), maximum(s2, s3)))
    largest = before if before > largest else largest
    shrink, top = exp(splat(before) - splat(largest)), splat(largest)
    s0, s1, s2, s3 = exp(s0 - top), exp(s1 - top), exp(s2 - top), exp(s3 - top)
    store(scores, 0, s0)
    store(scores, 16, s1)
    store(scores, 32, s2)
    store(scores, 48, s3)
    put_f32(state, 0, largest)
    store(state, LANES, load(state, LANES) * shrink + ((s0 + s1) + (s2 + s3)))
    for i in range(0, dim, LANES):
        store(out, i, load(out, i) * shrink)


@inline
def _valid(tile, position):
    """How many keys of the tile that starts at `tile` a query at `position` sees."""
    return min(_TILE, max(0, position + 1 - tile))


@function
def _meet_tile(scores, queries, sums, states, keys, values, rows, tile, position, group, pitch, dim, scale):
    """All rows of a block meet one staged tile; row i is a query at `position` + i // group."""
    i = 0
    while i < rows:
        together = 4 if i + 4 <= rows else 1
        clear_bytes(scores, together * _TILE * F32)
        if together == 4:
            _multiply_add_4x4(scores, _TILE, queries + i * pitch * F32, pitch, keys, _TILE, dim)
        else:
            _multiply_add_1x4(scores, _TILE, queries + i * pitch * F32, pitch, keys, _TILE, dim)
        for j in range(together):
            count = _valid(tile, position + (i + j) // group)
            if count > 0:
                state, out = states + (i + j) * 2 * LANES * F32, sums + (i + j) * pitch * F32
                _softmax(scores + j * _TILE * F32, state, out, dim, count, scale)
        # the keys that all four rows see, in fours; then what the later queries see beyond, row by row
        shared = _valid(tile, position + i // group) if together == 4 else 0
        out = sums + i * pitch * F32
        wide = dim & -PAD
        for c in range(0, wide, PAD):
            _multiply_add_4x4(out + c * F32, pitch, scores, _TILE, values + c * F32, pitch, shared)
        for c in range(wide, dim, LANES):
            _multiply_add_4x1(out + c * F32, pitch, scores, _TILE, values + c * F32, pitch, shared)
        for j in range(together):
            count = _valid(tile, position + (i + j) // group) - shared
            if count > 0:
                out, weights = sums + (i + j) * pitch * F32, scores + (j * _TILE + shared) * F32
                seen = values + shared * pitch * F32
                for c in range(0, wide, PAD):
                    _multiply_add_1x4(out + c * F32, pitch, weights, _TILE, seen + c * F32, pitch, count)
                for c in range(wide, dim, LANES):
                    _multiply_add_1x1(out + c * F32, pitch, weights, _TILE, seen + c * F32, pitch, count)
        i += together


@kernel(2)
def _clear(arguments):
    target, count = unpack(arguments, 0, 2)
    clear_bytes(target, count)


@kernel(16, floats=1)
def _paged_attention(arguments):
    q, q_row, out, code, cache, page, page_tokens, kv_heads = unpack(arguments, 0, 8)
    table, table_row, cu_seqlens, context_lens, requests, blocks, group, dim = unpack(arguments, 8, 8)
    scale = float_argument(arguments, 16)
    per_block = max(1, _BLOCK // group)  # queries
    pitch = (dim + PAD - 1) & -PAD
    queries, sums = scratch(per_block * group * pitch), scratch(per_block * group * pitch)
    states, scores = scratch(per_block * group * 2 * LANES), scratch(4 * _TILE)
    keys, values, staging = scratch(pitch * _TILE), scratch(pitch * _TILE), scratch(pitch * LANES)
    value_offset = kv_heads * page_tokens * dim
    part = next_part(arguments)
    while part < requests * kv_heads * blocks:
        h, r = part // blocks % kv_heads, part // blocks // kv_heads
        # the last queries have the most keys: they go first, so that threads end together
        start, end = get_i32(cu_seqlens, r), get_i32(cu_seqlens, r + 1)
        start, limit = start + (blocks - 1 - part % blocks) * per_block, end
        end = min(start + per_block, limit)
        rows = (end - start) * group
        position = get_i32(context_lens, r) - (limit - start)
        for i in range(rows):
            row = q + ((start + i // group) * q_row + (h * group + i % group) * dim) * code
            read_row(queries + i * pitch * F32, row, code, dim)
            put_f32(states, i * 2 * LANES, -math.inf)
            store(states, i * 2 * LANES + LANES, splat(0.0))
            clear_bytes(sums + i * pitch * F32, pitch * F32)
        context = position + end - start if rows > 0 else 0
        for tile in range(0, context, _TILE):
            count, home = min(_TILE, context - tile), cache + h * page_tokens * dim * code
            pages = table + r * table_row * 4
            _stage(keys, values, staging, home, page, pages, page_tokens, value_offset, tile, count, dim, pitch, code)
            _meet_tile(scores, queries, sums, states, keys, values, rows, tile, position, group, pitch, dim, scale)
        for i in range(rows):
            row, total = sums + i * pitch * F32, splat(sum_lanes(load(states, i * 2 * LANES + LANES)))
            if context <= 0:
                total = splat(1.0)  # a request of no keys: zeros
            for c in range(0, dim, LANES):
                store(row, c, load(row, c) / total)
            write_row(
                out + ((start + i // group) * kv_heads * group + h * group + i % group) * dim * code, code, row, dim
            )
        part = next_part(arguments)


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
    """See `reference.paged_attention`."""
    codes = code_of(q, kv_cache)
    if codes is None:
        return reference.paged_attention(q, kv_cache, page_table, cu_seqlens, context_lens, scale, max_query_len, out)
    _, heads, dim = q.shape
    _, _, kv_heads, page_tokens, _ = kv_cache.shape
    requests, pages = page_table.shape
    group = heads // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _clear(0, out.data_ptr(), out.nbytes)  # rows of no request
    _paged_attention(
        max_query_len * requests * pages * page_tokens * dim * kv_heads * 8,
        *(q.data_ptr(), q.stride(0), out.data_ptr(), codes[0]),
        *(kv_cache.data_ptr(), kv_cache.stride(0), page_tokens, kv_heads),
        *(page_table.data_ptr(), page_table.stride(0), cu_seqlens.data_ptr(), context_lens.data_ptr()),
        *(requests, -(-max_query_len // max(1, _BLOCK // group)), group, dim, scale),
    )
    return out
