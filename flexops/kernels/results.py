"""What the operators return: shapes and dtypes from their arguments, for fakes and for memory that a caller gives."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .tensors import describe, dtype_name

Result = tuple[Sequence[int], torch.dtype]


def _sums_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _like_first(first: Tensor, *_: object) -> list[Result]:
    return [(first.shape, first.dtype)]


def _gate_pool(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, w1: Tensor) -> list[Result]:
    return [(residual.shape, residual.dtype), ((residual.shape[0], w1.shape[0]), _sums_dtype(residual))]


def _gate_route(z: Tensor, cu_seqlens: Tensor, *_: object) -> list[Result]:
    requests = cu_seqlens.shape[0] - 1
    return [((requests, 2), z.dtype), ((requests,), torch.int32)]


def _gather_rows(x: Tensor, index: Tensor) -> list[Result]:
    return [((index.shape[0], x.shape[1]), x.dtype)]


def _split_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor) -> list[Result]:
    return [((order.shape[0], residual.shape[1]), residual.dtype)]


def _state_update(xBC: Tensor, z: Tensor, dt: Tensor, *_: object) -> list[Result]:
    return [(z.shape, xBC.dtype), (dt.shape, _sums_dtype(xBC))]


def _decode_branches(
    q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, xBC: Tensor, z: Tensor, dt: Tensor, *_: object
) -> list[Result]:
    return [(q.shape, q.dtype), *_state_update(xBC, z, dt)]


_RESULTS: dict[str, Callable[..., list[Result]]] = {
    "gate_pool": _gate_pool,
    "gate_route": _gate_route,
    "gather_rows": _gather_rows,
    "scatter_rows": lambda *_: [],
    "split_norm": _split_norm,
    "state_update": _state_update,
    "decode_branches": _decode_branches,
}


def results(operator: str, arguments: tuple) -> list[Result]:
    """Shape and dtype of each result of an operator for these positional arguments."""
    return _RESULTS.get(operator, _like_first)(*arguments)


def room(operator: str, arguments: tuple) -> tuple[Tensor, ...]:
    """Memory for the results of an operator for these positional arguments, on the device of the first."""
    made = results(operator, arguments)
    return tuple(torch.empty(shape, dtype=dtype, device=arguments[0].device) for shape, dtype in made)


def check_given(operator: str, arguments: tuple, out: Sequence[Tensor]) -> None:
    """Check that the tensors of `out` can take the results of this call: shape, dtype, device, contiguous memory.

    Raises ValueError with the tensor's name, what it is and what is allowed.
    """
    expected, device = results(operator, arguments), arguments[0].device
    for i, ((shape, dtype), given) in enumerate(zip(expected, out, strict=True)):
        right = given.shape == torch.Size(shape) and given.dtype == dtype and given.device == device
        if not (right and given.is_contiguous()):
            name = "out" if len(expected) == 1 else f"out[{i}]"
            allowed = f"contiguous memory of shape {list(shape)}, dtype {dtype_name(dtype)}"
            raise ValueError(
                f"{name}: got {describe(given)}; allowed: {allowed}, device {device}, "
                "or None for memory of the operator's own"
            )


def check_workspace(workspace: Tensor, first: Tensor, numbers: int) -> None:
    """Check that the workspace has room for so many fp32 numbers. Raises ValueError."""
    right = workspace.dim() == 1 and workspace.dtype == torch.float32 and workspace.device == first.device
    if not (right and workspace.is_contiguous() and workspace.numel() >= numbers):
        raise ValueError(
            f"workspace: got {describe(workspace)}; allowed: contiguous float32 of one dim with at least {numbers} "
            f"numbers (attention_workspace) on {first.device}, or None for one of the operator's own"
        )
