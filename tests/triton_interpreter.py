"""Repairs of Triton's interpreter, so that a kernel run on a CPU computes what it would compute on a GPU.

Needed on triton 3.6 to 3.9; `install` is called by tests/conftest.py before any kernel is imported.
1. bfloat16 blocks are held as raw uint16 upstream, so sums and dots of them are garbage and casts truncate:
   here they are held as `ml_dtypes.bfloat16`, with real arithmetic and round-to-nearest-even.
2. `for i in range(n)` with a runtime n dies on triton 3.6 with numpy >= 2.4.
3. Masks that are not numpy bool are refused by triton 3.9.
4. A lane that is masked off in a load without `other` reads 0 upstream, and anything on a GPU: here it reads NaN.
5. Accesses outside of memory are silent upstream: here an address outside of the storages of the launch's tensors
   raises IndexError at the kernel's line.
Casts to fp8, bfloat16 atomics and `tl.exp` of a bfloat16 block stay broken.
"""

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_Executor = interpreter.GridExecutor
_get_np_dtype = interpreter._get_np_dtype
_init_args = _Executor._init_args_hst
_patch_lang_tensor = interpreter._patch_lang_tensor
_load, _store = _Builder.create_masked_load, _Builder.create_masked_store
_cast, _fp_to_fp, _dot = _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot


def _np_dtype(ty):
    scalar = ty.element_ty if isinstance(ty, tl.block_type) else ty
    return _BFLOAT16 if scalar == tl.bfloat16 else _get_np_dtype(ty)


def _bool_mask(mask):
    if not isinstance(mask, _Handle) or mask.data.dtype == np.bool_:
        return mask
    return _Handle(mask.data.astype(np.bool_), tl.int1)


class _Memory:
    """The storages that the running launch may touch, as sorted byte ranges."""

    def __init__(self) -> None:
        self.starts, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def allow(self, tensors: list[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        ranges = sorted((start, start + size) for start, size in storages.items() if size)
        self.starts, self.ends = np.array(ranges, np.uint64).reshape(-1, 2).T

    def check(self, ptrs, mask) -> None:
        address = np.asarray(ptrs.data)[np.broadcast_to(mask.data, np.shape(ptrs.data))].astype(np.uint64)
        place = np.searchsorted(self.starts, address, side="right").astype(np.int64) - 1
        size = np.uint64(np.dtype(_np_dtype(ptrs.get_element_ty())).itemsize)
        ends = self.ends[place] if len(self.ends) else np.zeros_like(address)
        outside = (place < 0) | (address + size > ends)
        if outside.any():
            raise IndexError(
                f"{outside.sum()} of {address.size} lanes lie outside of the memory of the launch's tensors"
            )


_memory = _Memory()


def _init_args_and_memory(self, args, kwargs):
    args, kwargs = _init_args(self, args, kwargs)
    _memory.allow([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    return args, kwargs


def _undefined(shape, dtype):
    """What masked-off lanes hold after a load without `other`: NaN, or the largest integer."""
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, np.iinfo(dtype).max, dtype)
    return np.full(shape, True if dtype == np.bool_ else float("nan")).astype(dtype)


def _masked_load(self, ptrs, mask, other, *args, **kwargs):
    mask = _bool_mask(mask)
    _memory.check(ptrs, mask)
    element, shape = ptrs.get_element_ty(), np.shape(ptrs.data)
    fill = _undefined(shape, np.dtype(_np_dtype(element))) if other is None else np.asarray(other.data)
    if element != tl.bfloat16:
        return _load(self, ptrs, mask, _Handle(fill, element), *args, **kwargs)
    fill = np.ascontiguousarray(np.broadcast_to(fill.astype(_BFLOAT16), shape)).view(np.uint16)
    bits = interpreter._interpreter.load(ptrs.data, mask.data, fill, np.dtype(np.uint16))
    return _Handle(np.asarray(bits).view(_BFLOAT16), tl.bfloat16)


def _masked_store(self, ptrs, value, mask, *args, **kwargs):
    mask = _bool_mask(mask)
    _memory.check(ptrs, mask)
    if value.data.dtype == _BFLOAT16:
        value = _Handle(np.ascontiguousarray(value.data).view(np.uint16), value.dtype)
    return _store(self, ptrs, value, mask, *args, **kwargs)


def _cast_impl(self, src, dst_type):
    if tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar):
        return _cast(self, src, dst_type)
    data = src.data if src.data.dtype == _BFLOAT16 else src.data.astype(np.float32)
    return _Handle(data.astype(_np_dtype(dst_type)), dst_type.scalar)


def _create_fp_to_fp(self, src, dst_type, rounding_mode):
    if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
        return _cast_impl(self, src, dst_type)
    return _fp_to_fp(self, src, dst_type, rounding_mode)


def _create_dot(self, a, b, acc, *args, **kwargs):
    if _BFLOAT16 not in (a.data.dtype, b.data.dtype):
        return _dot(self, a, b, acc, *args, **kwargs)
    left, right = (h.data.astype(np.float32) if h.data.dtype == _BFLOAT16 else h.data for h in (a, b))
    return _Handle(np.matmul(left, right, dtype=acc.data.dtype) + acc.data, acc.dtype.scalar)


def _get_bf16(self, value):
    return _Handle(np.array([value], dtype=_BFLOAT16), tl.bfloat16)


def _patched_lang_tensor(tensor, scope):
    result = _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))
    return result


def install() -> None:
    """Put the repairs into triton's interpreter; calling it twice changes nothing."""
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang_tensor = _patched_lang_tensor
    _Executor._init_args_hst = _init_args_and_memory
    _Builder.create_masked_load, _Builder.create_masked_store = _masked_load, _masked_store
    _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _cast_impl, _create_fp_to_fp, _create_dot
    _Builder.get_bf16 = _get_bf16
