"""Shared by the kernel tests: inputs as callers have them, page pools, and the error bound against fp64.

The oracle of every operator is `reference.py` on fp64 copies of the inputs. A form is right if its largest error is
at most twice that of the reference at the same dtype, plus one rounding of the largest result (`check`).
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SANITIZED = "ttsem" in sys.modules  # `make sanitize`: CPU memory under the name of CUDA, kernels run by ttsem
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
]


def triton_module(name: str) -> ModuleType:
    """The Triton file flexops/kernels/<name>.py; the whole test file is skipped where triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module(f"flexops.kernels.{name}")


def launch_grids(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[tuple[int, ...]]:
    """The grids of the launches made from here on by a Triton file, whose kernels no longer run."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for name in vars(module):
        if name.endswith("_kernel"):
            monkeypatch.setattr(module, name, Recorder())
    return grids


# --- inputs ---------------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers that depend on the seed and the shape only; different arguments want different seeds."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def rows_of_projection(
    rows: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, before: int = 8, after: int = 8
) -> Tensor:
    """[rows, *shape] as a slice of a wider NaN-filled matrix, as a fused projection hands it on."""
    width = torch.Size(shape).numel()
    wide = torch.full((rows, before + width + after), float("nan"), dtype=dtype, device=DEVICE)
    part = wide[:, before : before + width]
    part.copy_(randn(rows, width, dtype=dtype, seed=seed))
    return part.unflatten(1, shape)


def ints(values: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
    """An index tensor."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """int32 [R+1] of sequences with these lengths."""
    return torch.cat([ints([0]), ints(lengths).cumsum(0, dtype=torch.int32)])


def far_rows(rows: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros [rows, *shape] with 2^30 elements between rows: offsets of rows from 2 on need 64 bits.

    On a CPU only the memory that is touched is taken from the system.
    """
    if SANITIZED:
        pytest.skip("the sanitizer copies all of the memory before and after a launch")
    count = (rows - 1) * 2**30 + torch.Size(shape).numel()
    if DEVICE == "cpu":
        memory = torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
    else:
        memory = torch.zeros(count, dtype=dtype, device=DEVICE)
    return memory.as_strided((rows, *shape), (2**30, *torch.empty(shape, device="meta").stride()))


# --- pages ----------------------------------------------------------------------------------------------------


def pages(num_pages: int, *shape: int, dtype: torch.dtype = torch.float32, slack: int = 16) -> Tensor:
    """A NaN-filled cache [num_pages, *shape], contiguous but for dim 0, where each page ends in `slack` elements."""
    size = torch.Size(shape).numel()
    pool = torch.full((num_pages, size + slack), float("nan"), dtype=dtype, device=DEVICE)
    return pool[:, :size].unflatten(1, shape)


def page_tables(counts: Sequence[int], num_pages: int, seed: int = 0, width: int | None = None) -> Tensor:
    """int32 [R, width]: counts[r] pages for request r, in no order, no page twice, -1 after them."""
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    assert sum(counts) <= num_pages, "not enough pages"
    width = max([1, *counts]) if width is None else width
    rows = []
    for count in counts:
        rows.append(order[:count] + [-1] * (width - count))
        order = order[count:]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(counts), width)


# --- oracle ---------------------------------------------------------------------------------------------------


def whole_storage(x: Tensor) -> Tensor:
    """All elements of x's storage, those in the gaps of a strided view too, as one row."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def copy_with_storage(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of x with the same strides inside a copy of its whole storage, so that gaps can be inspected too."""
    return whole_storage(x).to(dtype or x.dtype, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def bits(x: Tensor) -> Tensor:
    """x as integers of the same size: equal where the bytes are, NaN included."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_bound(ours: Tensor, same: Tensor, exact: Tensor, what: str = "result") -> None:
    """max|ours - exact| <= 2 max|same - exact| + eps max|exact|, and NaN only where the oracle has it.

    `same` is the reference at our dtype, `exact` the reference in fp64.  The last term is one rounding of the largest
    result: among few elements the reference can be exact by luck.  The sanitizer sums one by one, with larger errors.
    """
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    assert ours.dtype == same.dtype, f"{what}: {ours.dtype}, not {same.dtype}"
    nan = exact.isnan()
    wrong = (ours.isnan() != nan).nonzero()
    assert len(wrong) == 0, f"{what}: NaN or not, unlike the oracle, at {len(wrong)} places, first {wrong[:4].tolist()}"
    eps = torch.finfo(ours.dtype).eps
    ours, same, exact = ours[~nan].double(), same[~nan].double(), exact[~nan].double()
    if exact.numel() == 0:
        return
    factor = 4 if SANITIZED else 2
    error, allowed = (ours - exact).abs().max(), factor * (same - exact).abs().max() + eps * exact.abs().max()
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def check(ours: Callable, reference: Callable, *args, mutated: Sequence[int] = ()):
    """Run both on copies of args and compare results and the arguments at the positions `mutated`.

    Where the reference leaves a mutated argument as it was, ours must leave the same bytes, through its whole storage;
    all other tensors must come back unchanged.  Returns what ours returned and its copy of the arguments.
    """

    def copies(double: bool) -> list:
        dtypes = [torch.float64 if double and isinstance(x, Tensor) and x.is_floating_point() else None for x in args]
        return [copy_with_storage(x, d) if isinstance(x, Tensor) else x for x, d in zip(args, dtypes, strict=True)]

    our_args, same_args, exact_args = copies(False), copies(False), copies(True)
    our_result, same, exact = ours(*our_args), reference(*same_args), reference(*exact_args)
    results = [x if isinstance(x, tuple) else (x,) for x in (our_result, same, exact)]
    for i, (a, b, c) in enumerate(zip(*results, strict=True)):
        if c.is_floating_point():
            assert_bound(a, b, c, f"result {i}")
        else:
            assert a.dtype == b.dtype and torch.equal(a, c), f"result {i}: {a.tolist()}, not {c.tolist()}"
    for i, before in enumerate(args):
        if not isinstance(before, Tensor):
            continue
        start, end = whole_storage(before), whole_storage(our_args[i])
        if i not in mutated:
            assert torch.equal(bits(start), bits(end)), f"argument {i} was written"
            continue
        same_end, exact_end = whole_storage(same_args[i]), whole_storage(exact_args[i])
        kept = bits(same_end) == bits(start)
        spoiled = (bits(end)[kept] != bits(start)[kept]).sum()
        assert spoiled == 0, f"argument {i}: {spoiled} elements written that should be left alone"
        assert_bound(end[~kept], same_end[~kept], exact_end[~kept], f"argument {i}")
    return our_result, our_args
