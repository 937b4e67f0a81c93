"""What the functions of the public face share: gradients, leading dims, memory given by the caller."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks, reference
from .library import OPS, TAKES_OUT


def module_that_keeps(names: list[str]) -> type[ModuleType]:
    """A module whose attributes of these names stay when a submodule of the same name is imported.

    Importing a Triton file, such as ssd_scan.py, would put that file where its operator stands.
    """

    class Face(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (isinstance(value, ModuleType) and name in names):
                super().__setattr__(name, value)

    return Face


def records_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def refuse_gradient(operator: str, remedy: str, **tensors: Tensor | None) -> None:
    """Refuse where autograd would miss what an in-place operator does."""
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires a gradient, which {operator} does not give; allowed: {remedy}")


def without_out(operator: str, out: Tensor | None) -> None:
    """Refuse memory of the caller where a gradient is recorded: autograd has to own the results."""
    if out is not None:
        raise ValueError(f"out: given to {operator} where a gradient is recorded; allowed: torch.no_grad(), or None")


def without_cache(operator: str, cache: Tensor | None) -> None:
    if cache is not None:
        raise ValueError(
            f"{operator}: got a cache where a gradient is recorded; allowed: torch.no_grad(), or no cache and pages"
        )


def rows(x: Tensor) -> Tensor:
    """x [..., D] as [T, D]."""
    return x.flatten(0, -2) if x.dim() > 2 else x


def rows_back(y: Tensor, x: Tensor) -> Tensor:
    """The inverse of `rows`, for a result with the shape of x."""
    return y.view(x.shape) if x.dim() > 2 else y


def run(name: str, arguments: tuple, out: Any = None, workspace: Tensor | None = None) -> Any:
    """An operator's results; in `out`, a tensor or a tuple of them, where the caller gives memory for them.

    Raises ValueError for another number of tensors in out, for a workspace without out, and as the operator does.
    """
    if out is None:
        if workspace is not None:
            raise ValueError(f"workspace: given to {name} without out; allowed: with out, or None")
        return getattr(OPS, name)(*arguments)
    given = out if isinstance(out, tuple | list) else (out,)
    count, _ = TAKES_OUT[name]
    if len(given) != count:
        raise ValueError(f"out: got {len(given)} tensors; allowed: {count}, one for each result of {name}, or None")
    options = {f"out{i}": x for i, x in enumerate(given)}
    if workspace is not None:
        options["workspace"] = workspace
    getattr(OPS, f"{name}_out")(*arguments, **options)
    return out


def run_or_record(name: str, arguments: tuple, out: Any = None) -> Any:
    """`run`, or the operator's definition, which torch differentiates, where a gradient is recorded.

    Raises ValueError as `run` does, and for out where a gradient is recorded.
    """
    if not records_gradient(*(t for t in arguments if isinstance(t, Tensor))):
        return run(name, arguments, out)
    without_out(name, out)
    getattr(checks, name)(*arguments)
    return getattr(reference, name)(*arguments)
