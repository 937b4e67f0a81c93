"""Bytes that each Triton kernel moves through device memory, counted without a GPU, over the least it could move.

The kernels run in Triton's interpreter, and every load and store is seen lane by lane. A GPU has an L2 cache in
between; this is the model of it. Loads fetch whole sectors of 32 bytes. A sector is still in the cache if
  - the same program touched it at most 96 KiB of its own traffic ago (50 MB of L2, shared by some 500 programs), or
  - another program of the same launch did, at most 4 MiB of all traffic ago (weights; rows that several heads need).
Each launch starts with a cold cache, stores are counted to the byte. `requested` is what the lanes asked for, without
any cache. The minimum is a formula of the sizes: every input read once, every output written once. Where a ratio has
no target the kernel is bound by arithmetic, or too small to matter, and the number is stated only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from common import Report, arguments
from least_bytes import LEAST

from tests.kernels import inputs
from tests.kernels.inputs import Size

SECTOR = 32
PRIVATE_BYTES = 96 * 1024
SHARED_BYTES = 4 * 1024 * 1024
TARGET = 1.05

QUICK = Size(
    lengths=(40, 1, 48),
    cached=(24, 0, 64),
    hidden=2048,
    ffn=2048,
    q_heads=16,
    kv_heads=4,
    head_dim=64,
    page_tokens=16,
    ssm_heads=16,
    ssm_head_dim=64,
    groups=1,
    d_state=128,
    chunk_size=32,
    heads_per_page=2,
)
FULL = replace(QUICK, lengths=(160, 1, 95, 64), cached=(96, 0, 200, 64), hidden=4096, chunk_size=64)


# --- counting -------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Bytes seen so far, and which program touched which sector when."""

    loaded: int = 0
    stored: int = 0
    requested: int = 0
    launches: int = 0
    touched: dict[int, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    own: dict[tuple[int, ...], int] = field(default_factory=dict)
    total: int = 0

    def launch(self) -> None:
        self.launches += 1
        self.touched.clear()
        self.own.clear()

    def load(self, program: tuple[int, ...], addresses: Any, size: int) -> None:
        self.requested += addresses.size * size
        for sector in _sectors(addresses, size):
            last = self.touched.get(sector)
            if last is None:
                hit = False
            elif last[0] == program:
                hit = self.own[program] - last[1] <= PRIVATE_BYTES
            else:
                hit = self.total - last[2] <= SHARED_BYTES
            self.loaded += 0 if hit else SECTOR
            self._touch(program, sector)

    def store(self, program: tuple[int, ...], addresses: Any, size: int) -> None:
        self.requested += addresses.size * size
        self.stored += addresses.size * size
        for sector in _sectors(addresses, size):
            self._touch(program, sector)

    def _touch(self, program: tuple[int, ...], sector: int) -> None:
        own = self.own.get(program, 0) + SECTOR
        self.total += SECTOR
        self.own[program] = own
        self.touched[sector] = (program, own, self.total)


def _sectors(addresses: Any, size: int) -> list[int]:
    import numpy as np

    return np.unique(np.concatenate([addresses // SECTOR, (addresses + size - 1) // SECTOR])).tolist()


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what kernels move that run inside, in the interpreter."""
    import numpy as np
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    originals = {name: getattr(builder, name) for name in names}
    run_grid = executor.__call__
    traffic = Traffic()

    def lanes(pointers: Any, mask: Any) -> Any:
        return np.asarray(pointers.data)[np.broadcast_to(np.asarray(mask.data).astype(bool), pointers.data.shape)]

    def width(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        traffic.load(self.grid_idx, lanes(pointers, mask).reshape(-1), width(pointers))
        return originals["create_masked_load"](self, pointers, mask, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        traffic.store(self.grid_idx, lanes(pointers, mask).reshape(-1), width(pointers))
        return originals["create_masked_store"](self, pointers, value, mask, *rest, **named)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = lanes(pointers, mask).reshape(-1)
        traffic.load(self.grid_idx, addresses, width(pointers))
        traffic.store(self.grid_idx, addresses, width(pointers))
        return originals["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    def run(self: Any, *args: Any, **named: Any) -> Any:
        traffic.launch()
        return run_grid(self, *args, **named)

    try:
        for name, function in zip(names, (load, store, atomic), strict=True):
            setattr(builder, name, function)
        executor.__call__ = run
        yield traffic
    finally:
        for name, function in originals.items():
            setattr(builder, name, function)
        executor.__call__ = run_grid


STATED = ("gate_route", "paged_attention", "paged_attention_decode", "causal_conv1d", "ssd_scan", "decode_branches")


def measure(case: str, size: Size) -> dict[str, float]:
    """Bytes of one call in bf16, and their ratio to the minimum."""
    from flexops.kernels import triton_backend

    call = inputs.arguments(case, size, torch.bfloat16)
    least = LEAST[case](*call)
    with counting() as traffic:
        getattr(triton_backend, inputs.operator(case))(*call)
    moved = traffic.loaded + traffic.stored
    return {
        "loaded_bytes": traffic.loaded,
        "stored_bytes": traffic.stored,
        "requested_bytes": traffic.requested,
        "minimum_bytes": least,
        "launches": traffic.launches,
        "ratio": moved / least,
    }


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    from tests import triton_interpreter

    triton_interpreter.install()
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=LEAST, default=list(LEAST), metavar="KERNEL", help="these only")
    report = Report("kernel_traffic", parser)
    size = QUICK if report.options.quick else FULL
    rows = []
    for case in report.options.only:
        result = measure(case, size)
        report.data[case] = result
        moved = result["loaded_bytes"] + result["stored_bytes"]
        rows.append((case, moved, result["minimum_bytes"], result["ratio"], result["requested_bytes"] / moved))
        if case not in STATED:
            report.check(f"{case}.ratio", result["ratio"], TARGET, better="lower")
    report.data["size"] = vars(size)
    report.table("bytes moved, bf16", ("kernel", "moved", "minimum", "ratio", "requested / moved"), rows)
    report.finish()


if __name__ == "__main__":
    main()
