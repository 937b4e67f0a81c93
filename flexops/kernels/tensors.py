"""What a tensor is: for the checks of arguments, and for what they say."""

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(x: Tensor) -> str:
    """Shape, strides, dtype and device, for messages."""
    return f"shape {list(x.shape)}, strides {list(x.stride())}, dtype {dtype_name(x.dtype)}, device {x.device}"


def rows_contiguous(x: Tensor) -> bool:
    """Contiguous but for dim 0, whose rows do not overlap."""
    size = 1
    for length, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if length != 1 and stride != size:
            return x.numel() == 0
        size *= length
    return x.shape[0] <= 1 or x.stride(0) >= size
