"""What the CPU kernels are written in: vectors of 16 floats, and rows in fp32 scratch memory.

Why not plain numba loops: the bits of a result must not depend on where a row lies or on how a compiler cut a loop.
Here every sum runs in 16 explicit lanes that are joined in one fixed tree, every exp is the same arithmetic in every
lane, and rows are padded with zeros in scratch memory, so that no loop has a remainder. Multiplications and additions
are fused only where `fma` says so. LLVM turns a vector into one AVX-512 register, two of AVX or four of SSE or NEON,
with the same bits in each case.

Memory is named by int64 addresses: what `Tensor.data_ptr` gives and numba passes on at no cost.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
PAD = 64  # rows in scratch are padded with zeros to a multiple of it: four vectors, the stride of the sums
F32, BF16 = 4, 2  # the code of a dtype is its size in bytes
CACHE_LINE = 64  # bytes

_FLOAT = ir.FloatType()
_INT16, _INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, _INTS, _SHORTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES), ir.VectorType(_INT16, LANES)

inline = numba.njit(forceinline=True, error_model="numpy")
function = numba.njit(error_model="numpy")


# --- vectors --------------------------------------------------------------------------------------------------


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, FLOATS)


def _operator(op: Callable, instruction: str) -> None:
    """Teach numba `vector op vector`."""

    @infer_global(op)
    class Template(AbstractTemplate):
        def generic(self, args: tuple, kws: dict) -> Any:
            if not kws and all(a is f32x16 for a in args) and len(args) == 2:
                return signature(f32x16, f32x16, f32x16)

    @lower_builtin(op, f32x16, f32x16)
    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, instruction)(*args)


for _op, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_op, _instruction)


def _constant(values: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(values, [value] * LANES)


def broadcast(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _constant(_INTS, 0))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def pointer_to(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, element_bytes: int, to: ir.Type) -> ir.Value:
    offset = builder.mul(index, ir.Constant(INT64, element_bytes))
    return builder.inttoptr(builder.add(address, offset), to.as_pointer())


def emits(result: types.Type, *arguments: types.Type) -> Callable:
    """An intrinsic with this signature whose body is the decorated function (builder, *values) -> value."""

    def decorate(emit: Callable) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def typing(typingctx: Any, *args: types.Type) -> Any:
            return (result(*arguments), codegen) if len(args) == len(arguments) else None

        functools.update_wrapper(typing, emit)
        return intrinsic(typing)

    return decorate


@emits(f32x16, types.float32)
def splat(b, value):
    """The value in all lanes."""
    return broadcast(b, value)


@emits(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", FLOATS, [x, y, z])


@emits(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    """The larger of each lane, y where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@emits(f32x16, f32x16)
def absolute(b, x):
    """|x|."""
    return call(b, "llvm.fabs.v16f32", FLOATS, [x])


@emits(f32x16, f32x16, f32x16, f32x16)
def clamp(b, x, low, high):
    """x between low and high; NaN stays."""
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


@emits(f32x16, f32x16, types.int64, types.float32)
def only_first(b, x, count, other):
    """The first `count` lanes of x, another value in those behind."""
    lanes = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
    return b.select(b.icmp_signed("<", lanes, broadcast(b, count)), x, broadcast(b, other))


@emits(f32x16, f32x16, f32x16)
def _times_power(b, x, shifted):
    """x * 2^n, where `shifted` is n + 1.5 * 2^23; in two factors, so that results beyond the normal range are right."""
    n = b.sub(b.bitcast(shifted, _INTS), _constant(_INTS, 0x4B400000))
    half = b.ashr(n, _constant(_INTS, 1))
    for part in (half, b.sub(n, half)):
        exponent = b.shl(b.add(part, _constant(_INTS, 127)), _constant(_INTS, 23))
        x = b.fmul(x, b.bitcast(exponent, FLOATS))
    return x


@emits(types.float32, f32x16)
def sum_lanes(b, x):
    """The sum of the lanes, joined by halves."""
    return _join(b, x, lambda p, q: b.fadd(p, q))


@emits(f32x16, types.int64)
def sum_rows(b, address):
    """The sums of 16 rows of 16 floats, each joined as in `sum_lanes`."""
    rows = [b.load(pointer_to(b, address, ir.Constant(INT64, r * LANES), 4, FLOATS), align=4) for r in range(LANES)]
    while len(rows) > 1:
        half = len(rows) // 2
        halves = [interleave(b, rows[i], rows[i + half]) for i in range(half)]
        rows = [b.fadd(low, high) for low, high in halves]
    return rows[0]


@emits(types.float32, f32x16, types.int64)
def lane(b, x, index):
    """One lane."""
    return b.extract_element(x, b.trunc(index, _INT32))


@emits(types.float32, f32x16)
def max_lanes(b, x):
    """The largest lane."""
    return _join(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


def interleave(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> list[ir.Value]:
    """x0 y0 x1 y1 ... as two vectors."""
    starts = (0, LANES // 2)
    orders = [[start + n // 2 + LANES * (n % 2) for n in range(LANES)] for start in starts]
    return [b.shuffle_vector(x, y, ir.Constant(_INTS, order)) for order in orders]


def _join(b: ir.IRBuilder, x: ir.Value, combine: Callable) -> ir.Value:
    width = LANES
    while width > 1:
        width //= 2
        take = [ir.Constant(ir.VectorType(_INT32, width), list(range(s, s + width))) for s in (0, width)]
        x = combine(*(b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), t) for t in take))
    return b.extract_element(x, ir.Constant(_INT32, 0))


# --- memory ---------------------------------------------------------------------------------------------------


@emits(f32x16, types.int64, types.int64)
def load(b, address, index):
    """16 floats from element `index` of the fp32 array at `address`."""
    return b.load(pointer_to(b, address, index, 4, FLOATS), align=4)


@emits(types.void, types.int64, types.int64, f32x16)
def store(b, address, index, value):
    """The inverse of `load`."""
    b.store(value, pointer_to(b, address, index, 4, FLOATS), align=4)


@emits(f32x16, types.int64, types.int64)
def _load_bf16(b, address, index):
    return _from_bf16(b, b.load(pointer_to(b, address, index, 2, _SHORTS), align=2))


@emits(types.void, types.int64, types.int64, f32x16)
def _store_bf16(b, address, index, value):
    b.store(_to_bf16(b, value), pointer_to(b, address, index, 2, _SHORTS), align=2)


@emits(f32x16, f32x16)
def _round_bf16(b, x):
    return _from_bf16(b, _to_bf16(b, x))


def _from_bf16(b: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    return b.bitcast(b.shl(b.zext(halves, _INTS), _constant(_INTS, 16)), FLOATS)


def _to_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    raw = b.bitcast(x, _INTS)
    odd = b.and_(b.lshr(raw, _constant(_INTS, 16)), _constant(_INTS, 1))
    rounded = b.lshr(b.add(raw, b.add(odd, _constant(_INTS, 0x7FFF))), _constant(_INTS, 16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), _constant(_INTS, 0x7FC0), rounded), _SHORTS)


def _move(b: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    byte = ir.IntType(8).as_pointer()
    arguments = [b.bitcast(target, byte), b.bitcast(source, byte), count, ir.Constant(ir.IntType(1), 0)]
    call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), arguments)


def _load_part(
    b: ir.IRBuilder, address: ir.Value, index: ir.Value, count: ir.Value, size: int, of: ir.Type
) -> ir.Value:
    buffer = cgutils.alloca_once(b, of)
    b.store(ir.Constant(of, None), buffer)
    _move(b, buffer, pointer_to(b, address, index, size, of), b.mul(count, ir.Constant(INT64, size)))
    return b.load(buffer)


def _store_part(
    b: ir.IRBuilder, address: ir.Value, index: ir.Value, count: ir.Value, value: ir.Value, size: int
) -> None:
    buffer = cgutils.alloca_once(b, value.type)
    b.store(value, buffer)
    _move(b, pointer_to(b, address, index, size, value.type), buffer, b.mul(count, ir.Constant(INT64, size)))


@emits(f32x16, types.int64, types.int64, types.int64)
def load_part(b, address, index, count):
    """`load` of the first `count` < 16 elements, zeros behind them."""
    return _load_part(b, address, index, count, 4, FLOATS)


@emits(types.void, types.int64, types.int64, types.int64, f32x16)
def store_part(b, address, index, count, value):
    """`store` of the first `count` < 16 elements."""
    _store_part(b, address, index, count, value, 4)


@emits(f32x16, types.int64, types.int64, types.int64)
def _load_part_bf16(b, address, index, count):
    return _from_bf16(b, _load_part(b, address, index, count, 2, _SHORTS))


@emits(types.void, types.int64, types.int64, types.int64, f32x16)
def _store_part_bf16(b, address, index, count, value):
    _store_part(b, address, index, count, _to_bf16(b, value), 2)


def _scalar(numba_type: types.Type, llvm_type: ir.Type, size: int) -> tuple[Any, Any]:
    @emits(numba_type, types.int64, types.int64)
    def get(b, address, index):
        return b.load(pointer_to(b, address, index, size, llvm_type), align=size)

    @emits(types.void, types.int64, types.int64, numba_type)
    def put(b, address, index, value):
        b.store(value, pointer_to(b, address, index, size, llvm_type), align=size)

    return get, put


get_f32, put_f32 = _scalar(types.float32, _FLOAT, 4)
get_i32, put_i32 = _scalar(types.int32, _INT32, 4)
get_i64, _ = _scalar(types.int64, INT64, 8)


@emits(types.float32, types.int64, types.int64)
def _get_bf16(b, address, index):
    half = b.load(pointer_to(b, address, index, 2, _INT16), align=2)
    return b.bitcast(b.shl(b.zext(half, _INT32), ir.Constant(_INT32, 16)), _FLOAT)


@inline
def get(address, index, code):
    """One element of a dtype; 0 for code 0, that of an absent array."""
    if code == F32:
        return get_f32(address, index)
    return _get_bf16(address, index) if code == BF16 else np.float32(0)


@emits(types.int64, types.int64)
def scratch(b, count):
    """The address of `count` floats on the stack, until the kernel returns: call it once per use, never in a loop."""
    memory = b.alloca(ir.IntType(8), size=b.mul(count, ir.Constant(INT64, 4)))
    memory.align = 64
    return b.ptrtoint(memory, INT64)


@emits(types.void, types.int64, types.int64, types.int64)
def copy_bytes(b, target, source, count):
    """memcpy."""
    byte = ir.IntType(8).as_pointer()
    _move(b, b.inttoptr(target, byte), b.inttoptr(source, byte), count)


def prefetch_line(b: ir.IRBuilder, address: ir.Value) -> None:
    """Have the cache line at an address, which need not be valid, brought into the L2 cache."""
    read, to_l2, data = (ir.Constant(_INT32, code) for code in (0, 2, 1))
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, read, to_l2, data])


@emits(types.void, types.int64)
def prefetch(b, address):
    """`prefetch_line`."""
    prefetch_line(b, address)


@emits(types.void, types.int64, types.int64)
def clear_bytes(b, target, count):
    """memset to zero."""
    pointer = b.inttoptr(target, ir.IntType(8).as_pointer())
    arguments = [pointer, ir.Constant(ir.IntType(8), 0), count, ir.Constant(ir.IntType(1), 0)]
    call(b, "llvm.memset.p0.i64", ir.VoidType(), arguments)


@function
def read_row(target, source, code, count):
    """`count` elements of a dtype into fp32 scratch, padded with zeros to a multiple of PAD."""
    whole = count & -LANES
    if code == F32:
        for i in range(0, whole, LANES):
            store(target, i, load(source, i))
        if whole < count:
            store(target, whole, load_part(source, whole, count - whole))
    else:
        for i in range(0, whole, LANES):
            store(target, i, _load_bf16(source, i))
        if whole < count:
            store(target, whole, _load_part_bf16(source, whole, count - whole))
    for i in range((count + LANES - 1) & -LANES, (count + PAD - 1) & -PAD, LANES):
        store(target, i, splat(0.0))


@function
def write_row(target, code, source, count):
    """`count` floats of scratch to memory of a dtype, rounded to nearest even."""
    whole = count & -LANES
    if code == F32:
        for i in range(0, whole, LANES):
            store(target, i, load(source, i))
        if whole < count:
            store_part(target, whole, count - whole, load(source, whole))
    else:
        for i in range(0, whole, LANES):
            _store_bf16(target, i, load(source, i))
        if whole < count:
            _store_part_bf16(target, whole, count - whole, load(source, whole))


@function
def add_row(target, source, code, count):
    """target += a row of a dtype, rounded to that dtype: what an in-place addition of torch leaves."""
    whole = count & -LANES
    if code == F32:
        for i in range(0, whole, LANES):
            store(target, i, load(target, i) + load(source, i))
        if whole < count:
            store(target, whole, load(target, whole) + load_part(source, whole, count - whole))
    else:
        for i in range(0, whole, LANES):
            store(target, i, _round_bf16(load(target, i) + _load_bf16(source, i)))
        if whole < count:
            added = load(target, whole) + _load_part_bf16(source, whole, count - whole)
            store(target, whole, _round_bf16(added))


@function
def round_row(row, code, count):
    """Scratch rounded to what a dtype can hold."""
    if code == BF16:
        for i in range(0, count, LANES):
            store(row, i, _round_bf16(load(row, i)))


# --- functions ------------------------------------------------------------------------------------------------


@inline
def exp(x):
    """e^x, about one unit in the last place; 0 and infinity beyond the range of fp32."""
    x = clamp(x, splat(-104.0), splat(89.0))
    shifted = fma(x, splat(1.44269504), splat(12582912.0))  # x / ln 2, rounded to an integer by the large summand
    n = shifted - splat(12582912.0)
    r = fma(n, splat(-0.693145752), x)  # ln 2 in two parts, the first of few digits, so that n times it is exact
    r = fma(n, splat(-1.42860677e-06), r)
    p = fma(splat(0.00019907588), r, splat(0.0013933652))
    p = fma(p, r, splat(0.0083332863))
    p = fma(p, r, splat(0.041666467))
    p = fma(p, r, splat(0.16666667))
    p = fma(p, r, splat(0.5))
    p = fma(p, r * r, r) + splat(1.0)
    return _times_power(p, shifted)


@inline
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|))."""
    y = exp(splat(0.0) - absolute(x))
    s = y / (splat(2.0) + y)  # log1p(y) = 2 artanh(s), s <= 1/3
    u = s * s
    q = fma(splat(0.13442075), u, splat(0.14115602))
    q = fma(q, u, splat(0.20003892))
    q = fma(q, u, splat(0.3333332))
    twice = s + s
    return maximum(splat(0.0), x) + fma(twice, u * q, twice)


@inline
def silu(x):
    """x / (1 + exp(-x))."""
    return x / (splat(1.0) + exp(splat(0.0) - x))


@function
def dot(a, b, count):
    """sum of a[i] * b[i] over padded scratch rows."""
    s0, s1, s2, s3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(0, count, PAD):
        s0 = fma(load(a, i), load(b, i), s0)
        s1 = fma(load(a, i + 16), load(b, i + 16), s1)
        s2 = fma(load(a, i + 32), load(b, i + 32), s2)
        s3 = fma(load(a, i + 48), load(b, i + 48), s3)
    return sum_lanes((s0 + s1) + (s2 + s3))


@function
def dot_with(row, source, code, count):
    """`dot` of a padded scratch row and `count` elements of a dtype in memory."""
    s0, s1, s2, s3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    whole = count & -PAD
    if code == F32:
        for i in range(0, whole, PAD):
            s0 = fma(load(row, i), load(source, i), s0)
            s1 = fma(load(row, i + 16), load(source, i + 16), s1)
            s2 = fma(load(row, i + 32), load(source, i + 32), s2)
            s3 = fma(load(row, i + 48), load(source, i + 48), s3)
        for i in range(whole, count, LANES):
            s0 = fma(load(row, i), load_part(source, i, min(LANES, count - i)), s0)
    else:
        for i in range(0, whole, PAD):
            s0 = fma(load(row, i), _load_bf16(source, i), s0)
            s1 = fma(load(row, i + 16), _load_bf16(source, i + 16), s1)
            s2 = fma(load(row, i + 32), _load_bf16(source, i + 32), s2)
            s3 = fma(load(row, i + 48), _load_bf16(source, i + 48), s3)
        for i in range(whole, count, LANES):
            s0 = fma(load(row, i), _load_part_bf16(source, i, min(LANES, count - i)), s0)
    return sum_lanes((s0 + s1) + (s2 + s3))
