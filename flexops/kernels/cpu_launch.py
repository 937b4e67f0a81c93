"""How the CPU kernels are compiled and run.

A kernel is a function of the address of its arguments, compiled by numba on its first call and cached on disk. It
takes its work in numbered parts (`next_part`), so that one function serves a single thread and every thread of an
OpenMP team: torch's own team, since a second pool of threads would fight with torch's for the same cores.

numba's cache watches the file of a kernel only, not those it takes functions from; so the type of a kernel's argument,
which is part of what the cache compares, carries a hash of all these files.
"""

import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from flexops.kernels.cpu_simd import BF16, CACHE_LINE, F32, INT64, emits

FORK_FROM = 1 << 17  # bytes of work below which entering a team of threads costs more than it saves

_CODES = {torch.float32: F32, torch.bfloat16: BF16}
_C_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("cpu_*.py")))
# the address of a block of 8-byte values: the work counter, then the arguments
_arguments = types.Opaque(f"arguments of a kernel, {hashlib.sha256(_sources).hexdigest()}")


def _argument(builder: ir.IRBuilder, arguments: ir.Value, index: ir.Value, of: ir.Type) -> ir.Value:
    block = builder.bitcast(arguments, of.as_pointer())
    return builder.load(builder.gep(block, [builder.add(index, ir.Constant(INT64, 1))], source_etype=of), typ=of)


@emits(types.int64, _arguments)
def next_part(b, arguments):
    """The number of the next part of the work, each given out once among all threads."""
    counter = b.bitcast(arguments, INT64.as_pointer())
    return b.atomic_rmw("add", counter, ir.Constant(INT64, 1), "monotonic")


@emits(types.float32, _arguments, types.int64)
def float_argument(b, arguments, index):
    """The argument at this position, of type float64, as fp32."""
    return b.fptrunc(_argument(b, arguments, index, ir.DoubleType()), ir.FloatType())


@intrinsic
def unpack(typingctx, arguments, first, count):
    """The arguments at positions `first` .. `first + count` of the kernel, as a tuple of int64."""
    if not (isinstance(first, types.IntegerLiteral) and isinstance(count, types.IntegerLiteral)):
        return None
    positions = range(first.literal_value, first.literal_value + count.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        values = [_argument(builder, args[0], ir.Constant(INT64, i), INT64) for i in positions]
        return context.make_tuple(builder, sig.return_type, values)

    return types.UniTuple(types.int64, len(positions))(_arguments, first, count), codegen


def _openmp() -> Any:
    """The entry of the OpenMP runtime that torch has loaded; None where it is of another kind (macOS, Windows)."""
    fork = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if sys.platform == "linux" else None
    if fork is not None:
        fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        fork.restype = None
    return fork


_fork = _openmp()

launches: ContextVar[list | None] = ContextVar("flexops_launches", default=None)  # where `cpu_replay` records them


def fork() -> int:
    """The address of OpenMP's entry; 0 where there is none."""
    return 0 if _fork is None else ctypes.cast(_fork, ctypes.c_void_p).value or 0


class Kernel:
    """A compiled function of int64 and float64 arguments."""

    def __init__(self, function: Callable[[Any], None], integers: int, floats: int) -> None:
        self._function = function
        block = struct.Struct(f"q{integers}q{floats}d")
        self._pack_into = block.pack_into
        self._block = ctypes.c_char * block.size

    @functools.cached_property
    def _compiled(self) -> Any:
        return numba.cfunc(types.void(_arguments), cache=True, nopython=True, error_model="numpy")(self._function)

    @functools.cached_property
    def _call(self) -> Callable[[Any], None]:
        return _C_KERNEL(self._compiled.address)

    def __call__(self, work_bytes: int, *arguments: float) -> None:
        """Run all parts; by several threads where there is enough work."""
        block = self._block()
        self._pack_into(block, 0, 0, *arguments)
        threads = 1 if work_bytes < FORK_FROM or _fork is None else torch.get_num_threads()
        recorded = launches.get()
        if recorded is not None:
            recorded.append((self._compiled.address, block, threads))
        if threads == 1:
            self._call(block)
        else:
            _fork(self._compiled.address, block, threads, 0)


def kernel(integers: int, floats: int = 0) -> Callable[[Callable[[Any], None]], Kernel]:
    """Decorator of a kernel that takes so many int64 arguments, then so many of type float64."""
    return lambda function: Kernel(function, integers, floats)


def aligned_memory(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] from the start of a cache line, not initialised.

    numpy asks the system for large pages where torch does not: a weight of several megabytes is read up to a tenth
    faster for one row.
    """
    block = np.empty(nbytes + CACHE_LINE, dtype=np.uint8)
    return block[-block.ctypes.data % CACHE_LINE :][:nbytes]


def code_of(*tensors: Tensor | None) -> list[int] | None:
    """The codes of the dtypes (0 for None), or None if there is one that the CPU kernels lack."""
    codes = [0 if t is None else _CODES.get(t.dtype, -1) for t in tensors]
    return None if -1 in codes else codes


def vector_of(x: Tensor | None, code: int) -> tuple[int, int]:
    """The arguments that name a parameter: address and code, both 0 for None."""
    return (0, 0) if x is None else (x.data_ptr(), code)


def table_of(x: Tensor | None) -> tuple[int, int]:
    """The arguments that name rows: address and elements from row to row, both 0 for None."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))
