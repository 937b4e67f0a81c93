"""Which form of the operators runs: Triton on CUDA, numba on the CPU, or the definition in plain torch.

Each backend is one module that holds every operator of `reference.py` under the same name and signature, without
argument checks. Code that has checked its arguments once takes the module from `select` and calls it directly.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import torch

BACKENDS = {
    "reference": "flexops.kernels.reference",
    "cpu": "flexops.kernels.cpu",
    "triton": "flexops.kernels.triton_backend",
}

_forced: ContextVar[str | None] = ContextVar("flexops_backend", default=None)


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name])


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True where Triton kernels run on CPU tensors, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the operators called inside in one form: "reference", "cpu" or "triton".

    Holds for this thread or task only. "reference" runs on every device, "cpu" on the CPU, "triton" on CUDA, and on
    the CPU where TRITON_INTERPRET=1.

    Raises ValueError for another name, and in the operator where the form cannot run on the device.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def _forced_module(name: str, device_type: str) -> ModuleType:
    if name == "cpu" and device_type != "cpu":
        raise ValueError(f"backend 'cpu' got tensors on {device_type!r}; allowed: CPU tensors, or another backend")
    if name == "triton" and device_type != "cuda" and not (device_type == "cpu" and interpreting()):
        raise ValueError(
            f"backend 'triton' got tensors on {device_type!r}; allowed: CUDA tensors, or CPU tensors where the "
            "environment has TRITON_INTERPRET=1 since before triton was imported"
        )
    if name == "triton" and not _has_triton():
        raise ValueError("backend 'triton' needs the package triton, which is not installed: pip install triton")
    return _module(name)


def select(device: torch.device) -> ModuleType:
    """The module whose operators run on tensors of this device.

    CUDA: Triton. CPU: numba, or Triton where TRITON_INTERPRET=1. Other devices: plain torch. `backend` overrides it.
    Returns the module; its functions have the signatures of `reference.py` and check nothing. Triton launches on the
    current CUDA device, which must be that of the tensors; the public face sees to it.
    Raises ValueError where `backend` asks for a form that cannot run on the device.
    """
    forced = _forced.get()
    if forced is not None:
        return _forced_module(forced, device.type)
    if device.type == "cuda":
        if _has_triton():
            return _module("triton")
        warnings.warn("triton is not installed: flexops runs plain torch on CUDA, slowly", stacklevel=2)
    elif device.type == "cpu":
        return _module("triton" if interpreting() and _has_triton() else "cpu")
    return _module("reference")
