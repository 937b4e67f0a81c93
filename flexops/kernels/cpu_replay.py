"""Launches of CPU kernels, recorded once and run again as one call: what a CUDA graph is on a GPU.

An operator costs some ten microseconds of Python, and a decode step has a hundred of them: the same ones, with the same
arguments, as long as the same requests decode. Recorded, they run again in their order, on the same memory, to the same
bits. Whoever replays changes the contents of inputs, never their place.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexops.kernels.cpu_launch import aligned_memory, fork, kernel, launches, unpack
from flexops.kernels.cpu_simd import INT64, emits, get_i64

_Block = ctypes.Array[ctypes.c_char]


@emits(types.void, types.int64, types.int64, types.int64, types.int64)
def _launch(b, function, block, threads, fork):
    """Run a kernel on its block of arguments from part 0; by a team where there are threads for one."""
    pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    b.store(ir.Constant(INT64, 0), b.inttoptr(block, INT64.as_pointer()))
    alone = ir.FunctionType(ir.VoidType(), [pointer])
    team = ir.FunctionType(ir.VoidType(), [pointer, pointer, word, word])
    with b.if_else(b.icmp_signed("==", threads, ir.Constant(INT64, 1))) as (then, otherwise):
        with then:
            b.call(b.inttoptr(function, alone.as_pointer()), [b.inttoptr(block, pointer)])
        with otherwise:
            arguments = [b.inttoptr(function, pointer), b.inttoptr(block, pointer), b.trunc(threads, word)]
            b.call(b.inttoptr(fork, team.as_pointer()), [*arguments, ir.Constant(word, 0)])


@kernel(3)
def _replay(arguments):
    table, count, fork = unpack(arguments, 0, 3)
    for i in range(count):
        _launch(get_i64(table, 3 * i), get_i64(table, 3 * i + 1), get_i64(table, 3 * i + 2), fork)


class Recording:
    """The launches of one `record`, and the memory that they use."""

    def __init__(self, table: np.ndarray, blocks: list[_Block], memory: list[np.ndarray]) -> None:
        """table: int64 [launches, 3], function, address of its arguments, threads."""
        self._table, self._blocks, self.memory = table, blocks, memory

    def __len__(self) -> int:
        return len(self._table)

    def replay(self) -> None:
        """Run the launches again."""
        _replay(0, self._table.ctypes.data, len(self._table), fork())


class _Memory(TorchDispatchMode):
    """Gives tensors memory that outlives them, reused as the recorded operators free and allocate it, so that a replay
    touches no more memory than they did. Notes whether torch itself computed something, which no replay would do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[np.ndarray] = []
        self.kernels_only = True
        self._free: dict[int, list[np.ndarray]] = {}

    def _empty(self, size: Any, dtype: torch.dtype) -> Tensor:
        count = int(np.prod(size, dtype=np.int64))
        nbytes = max(1, count * dtype.itemsize)
        free = self._free.setdefault(nbytes, [])
        if free:
            block = free.pop()
        else:
            block = aligned_memory(nbytes)
            self.blocks.append(block)
        lent = block[:]  # lives as long as a tensor has its memory
        weakref.finalize(lent, free.append, block)
        return torch.from_numpy(lent)[: count * dtype.itemsize].view(dtype).view(*size)

    def __torch_dispatch__(self, func: Any, classes: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = kwargs or {}
        made = self._allocate(func.overloadpacket.__name__, args, options)
        if made is not None:
            return made
        returns = func._schema.returns
        if not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns):
            self.kernels_only = False
        return func(*args, **options)

    def _allocate(self, name: str, args: tuple, options: dict) -> Tensor | None:
        """What an allocating operator returns, contiguous on the CPU; None for any other."""
        like: Any = args[0] if name in ("new_empty", "empty_like") else None
        device = options.get("device") or (torch.device("cpu") if like is None else like.device)
        if name not in ("empty", "new_empty", "empty_like") or torch.device(device).type != "cpu":
            return None
        if name == "empty_like" and list(like.stride()) != sorted(like.stride(), reverse=True):
            return None  # torch would keep the order of the strides
        size = args[0] if name == "empty" else args[1] if name == "new_empty" else like.shape
        return self._empty(size, options.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype))


@contextmanager
def record() -> Iterator[Callable[[], Recording | None]]:
    """Run the operators called inside, and record their launches.

    Yields a function that returns the Recording once they have run, or None where torch itself computed something.
    What they allocate inside stays theirs in every replay; tensors made elsewhere must be kept alive, in their place,
    by the caller. What Python reads from a tensor inside is not seen: it stays as it was.
    Raises RuntimeError inside of another one.
    """
    if launches.get() is not None:
        raise RuntimeError("launches are being recorded already: a recording cannot hold another one")
    memory = _Memory()
    made: list[tuple[int, _Block, int]] = []

    def recording() -> Recording | None:
        if not memory.kernels_only:
            return None
        table = np.array([(function, ctypes.addressof(block), threads) for function, block, threads in made], np.int64)
        return Recording(table, [block for _, block, _ in made], memory.blocks)

    token = launches.set(made)
    try:
        with memory:
            yield recording
    finally:
        launches.reset(token)
