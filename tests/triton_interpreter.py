"""Repairs of Triton's interpreter, so that a kernel run on a CPU computes what it would compute on a GPU.

Needed on triton 3.6 to 3.9; `install` is called by tests/conftest.py before any kernel is imported.
1. bfloat16 blocks are held as raw uint16 upstream, so sums and dots of them are garbage and casts truncate:
   here they are held as `ml_dtypes.bfloat16`, with real arithmetic and round-to-nearest-even.
2. `for i in range(n)` with a runtime n dies on triton 3.6 with numpy >= 2.4.
3. Masks that are not numpy bool are refused by triton 3.9.
Casts to fp8, bfloat16 atomics and `tl.exp` of a bfloat16 block stay broken.
"""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_get_np_dtype = interpreter._get_np_dtype
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


def _masked_load(self, ptrs, mask, other, *args, **kwargs):
    mask = _bool_mask(mask)
    if ptrs.get_element_ty() != tl.bfloat16:
        return _load(self, ptrs, mask, other, *args, **kwargs)
    fill = np.zeros((), _BFLOAT16) if other is None else np.asarray(other.data).astype(_BFLOAT16)
    fill = np.ascontiguousarray(np.broadcast_to(fill, np.shape(ptrs.data))).view(np.uint16)
    bits = interpreter._interpreter.load(ptrs.data, mask.data, fill, np.dtype(np.uint16))
    return _Handle(np.asarray(bits).view(_BFLOAT16), tl.bfloat16)


def _masked_store(self, ptrs, value, mask, *args, **kwargs):
    if value.data.dtype == _BFLOAT16:
        value = _Handle(np.ascontiguousarray(value.data).view(np.uint16), value.dtype)
    return _store(self, ptrs, value, _bool_mask(mask), *args, **kwargs)


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
    _Builder.create_masked_load, _Builder.create_masked_store = _masked_load, _masked_store
    _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _cast_impl, _create_fp_to_fp, _create_dot
    _Builder.get_bf16 = _get_bf16
