"""Products with a constant weight on CPUs with AVX-512, for any number of rows, each with the bits it has alone.

An output is a sum of chains of fused multiply-adds over 128 steps each, a step being one input, in bf16 two: so it is
for every number of rows, cut of the work and number of threads, and no chain is long enough to gather much error. The
weight is kept in blocks of 64 outputs, [steps][64], each read once from front to back: with few rows a product takes
as long as reading its weight does. With more, the weights of one chain are multiplied while those of the next are
fetched.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
import torch
from llvmlite import binding, ir
from numba.core import types
from torch import Tensor

from flexops.kernels.cpu_launch import aligned_memory, kernel, next_part, unpack
from flexops.kernels.cpu_simd import (
    CACHE_LINE,
    F32,
    FLOATS,
    INT64,
    LANES,
    broadcast,
    call,
    clear_bytes,
    emits,
    function,
    inline,
    load,
    pointer_to,
    prefetch_line,
    read_row,
    scratch,
    store,
    write_row,
)

BLOCK = 64  # outputs of a block: four vectors
_VECTORS = BLOCK // LANES
_TILE = 6  # rows whose sums of a block stay in registers: 24 of the 32
_ROWS = 48  # rows of one part of the work
_STEPS = 128  # steps of a chain; a block's weights of as many stay in the L1 cache while all rows of a part pass
_INT32, _PAIRS = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)


@functools.cache
def _features() -> dict[str, bool]:
    """What the processor has; nothing where numba was told to compile for another one."""
    config = numba.config
    return {} if config.CPU_NAME or config.CPU_FEATURES is not None else dict(binding.get_host_cpu_features())


def supports(weight: Tensor) -> bool:
    """Whether products with this weight run here.

    fp32: where the processor has AVX-512.  bf16: an even number of inputs, where the processor multiplies pairs of
    them and has no matrix unit, which oneDNN would use.
    """
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        return bool(_features().get("avx512f"))
    pairs = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return pairs and bool(_features().get("avx512bf16")) and not _features().get("amx-bf16")


def pack(weight: Tensor) -> Tensor:
    """weight: [outputs, inputs] that `supports` admits -> [blocks, steps, 64, inputs of a step], zeros behind."""
    outputs, inputs = weight.shape
    per_step = F32 // weight.element_size()
    blocks = -(-outputs // BLOCK)
    padded = weight.new_zeros(blocks * BLOCK, inputs)
    padded[:outputs] = weight
    blocked = padded.view(blocks, BLOCK, inputs // per_step, per_step).transpose(1, 2)
    packed = torch.from_numpy(aligned_memory(padded.nbytes)).view(weight.dtype).view(blocked.shape)
    return packed.copy_(blocked)


def _multiply_add(b: ir.IRBuilder, x: ir.Value, w: ir.Value, total: ir.Value) -> ir.Value:
    return call(b, "llvm.fma.v16f32", FLOATS, [b.bitcast(x, FLOATS), b.bitcast(w, FLOATS), total])


def _dot_pairs(b: ir.IRBuilder, x: ir.Value, w: ir.Value, total: ir.Value) -> ir.Value:
    bf16 = ir.VectorType(_BFloat(), 2 * LANES)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, b.bitcast(x, bf16), b.bitcast(w, bf16)])


class _BFloat(ir.Type):
    """bf16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _tile(rows: int, multiply: Callable) -> Any:
    """sums [rows, 64] += one chain each over x [rows, steps] and a block [steps, 64]; a step is 4 bytes.

    Every step also fetches two cache lines from `ahead` on, which moves by `pitch` bytes a step.
    """

    @emits(types.void, *[types.int64] * 7)
    def run(b, x, x_row, block, steps, sums, ahead, pitch):
        starts = [b.add(x, b.mul(x_row, ir.Constant(INT64, r))) for r in range(rows)]
        places = [pointer_to(b, sums, ir.Constant(INT64, LANES * i), 4, FLOATS) for i in range(rows * _VECTORS)]
        before, loop, behind = b.block, b.append_basic_block("steps"), b.append_basic_block("behind")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(INT64)
        step.add_incoming(ir.Constant(INT64, 0), before)
        totals = [b.phi(FLOATS) for _ in places]
        weights = [
            b.load(pointer_to(b, b.add(block, ir.Constant(INT64, v * LANES * 4)), step, BLOCK * 4, _PAIRS), align=4)
            for v in range(_VECTORS)
        ]
        fetched = b.add(ahead, b.mul(step, pitch))
        prefetch_line(b, fetched)
        prefetch_line(b, b.add(fetched, ir.Constant(INT64, CACHE_LINE)))
        new = []
        for r in range(rows):
            value = broadcast(b, b.load(pointer_to(b, starts[r], step, 4, _INT32), align=2))
            new += [multiply(b, value, weights[v], totals[r * _VECTORS + v]) for v in range(_VECTORS)]
        following = b.add(step, ir.Constant(INT64, 1))
        step.add_incoming(following, loop)
        for total, later in zip(totals, new, strict=True):
            total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            total.add_incoming(later, loop)
        b.cbranch(b.icmp_signed("<", following, steps), loop, behind)
        b.position_at_end(behind)
        for place, value in zip(places, new, strict=True):
            b.store(b.fadd(b.load(place, align=4), value), place, align=4)

    return run


def _rows(multiply: Callable) -> Any:
    """sums [count, 64] += the chains of `_tile` over count rows of x, as many at once as registers allow.

    ahead: the weights that are needed next; the tiles together fetch them, _STEPS steps of a block.
    """
    tile1, tile2, tile3, tile4, tile5, tile6 = (_tile(rows, multiply) for rows in range(1, _TILE + 1))

    @function
    def run(x, x_row, block, steps, sums, count, ahead):
        # a block has four lines a step: two tiles must fetch two each, from four tiles on one will do; a single tile is
        # as fast as memory, and nothing is gained by fetching
        pitch = 0 if count <= _TILE else 2 * CACHE_LINE if count <= 3 * _TILE else CACHE_LINE
        done = 0
        while done < count:
            here, into, left = x + done * x_row, sums + done * BLOCK * 4, count - done
            size = (left + 1) // 2 if left == 7 or left == 8 else min(left, _TILE)  # 4 + 3 and 4 + 4, not 6 and a rest
            if size == 6:
                tile6(here, x_row, block, steps, into, ahead, pitch)
            elif size == 5:
                tile5(here, x_row, block, steps, into, ahead, pitch)
            elif size == 4:
                tile4(here, x_row, block, steps, into, ahead, pitch)
            elif size == 3:
                tile3(here, x_row, block, steps, into, ahead, pitch)
            elif size == 2:
                tile2(here, x_row, block, steps, into, ahead, pitch)
            else:
                tile1(here, x_row, block, steps, into, ahead, pitch)
            done += size
            ahead += steps * pitch

    return run


_fp32_rows, _bf16_rows = _rows(_multiply_add), _rows(_dot_pairs)


@inline
def _product(arguments, add_rows):
    """All parts of a product; add_rows: that of the dtype."""
    x, x_row, weight, bias, out, out_row, rows, outputs, steps, code = unpack(arguments, 0, 10)
    sums, added = scratch(_ROWS * BLOCK), scratch(BLOCK)
    chunks = (rows + _ROWS - 1) // _ROWS
    part, parts = next_part(arguments), (outputs + BLOCK - 1) // BLOCK * chunks
    while part < parts:
        following = next_part(arguments)  # taken now, so that its first weights can be fetched
        first, chunk = part // chunks * BLOCK, part % chunks * _ROWS
        width, count = min(BLOCK, outputs - first), min(_ROWS, rows - chunk)
        here, block = x + chunk * x_row, weight + first * steps * 4
        clear_bytes(sums, count * BLOCK * 4)
        for at in range(0, steps, _STEPS):
            ahead = block + (at + _STEPS) * BLOCK * 4
            if at + _STEPS >= steps:
                ahead = weight + following // chunks * BLOCK * steps * 4
            add_rows(here + at * 4, x_row, block + at * BLOCK * 4, min(_STEPS, steps - at), sums, count, ahead)
        if bias != 0:
            read_row(added, bias + first * code, code, width)
            for r in range(count):
                for i in range(r * BLOCK, (r + 1) * BLOCK, LANES):
                    store(sums, i, load(sums, i) + load(added, i - r * BLOCK))
        for r in range(count):
            write_row(out + ((chunk + r) * out_row + first) * code, code, sums + r * BLOCK * 4, width)
        part = following


# each of its own, without free variables, so that numba finds it on disk
@kernel(10)
def _fp32_product(arguments):
    _product(arguments, _fp32_rows)


@kernel(10)
def _bf16_product(arguments):
    _product(arguments, _bf16_rows)


def linear(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + b.

    x: [T, inputs] in the dtype of W, rows may be strided, inputs may not.  packed: `pack(W)`.  bias: [outputs] in the
    same dtype, contiguous, or None.  out: [T, outputs] in the dtype of x, rows may be strided, written; None makes it.
    Nothing is checked.  Returns out, summed in fp32 and rounded once. In bf16 subnormal inputs count as zero.
    """
    rows = x.shape[0]
    out = x.new_empty(rows, outputs) if out is None else out
    product = _fp32_product if x.dtype == torch.float32 else _bf16_product
    size = x.element_size()
    product(
        packed.numel() * size,
        *(x.data_ptr(), x.stride(0) * size, packed.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), out.stride(0), rows, outputs, packed.shape[1], size),
    )
    return out
