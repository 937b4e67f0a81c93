"""Arguments of the SSM operators for their tests, and the order in which the interpreter runs programs."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.helpers import INTERPRETED, cu_seqlens, ints, page_tables, pages, randn, rows_of_projection


def entries(count: int, shape: tuple[int, ...], need: int, per_page: int, dtype: torch.dtype, seed: int = 0):
    """A cache whose entries take `need` units of `per_page` a page, and three tables [count, pages] of it.

    The pages of the first table hold numbers; those of the other two, and all else, NaN.
    """
    each = -(-need // per_page)
    cache = pages(3 * count * each + 2, *shape, dtype=dtype)
    tables = page_tables([each] * (3 * count), cache.shape[0], seed=seed)
    filled = tables[:count]
    cache[filled.flatten().long()] = randn(filled.numel(), *shape, dtype=dtype, seed=seed + 50)
    return cache, filled.clone(), tables[count : 2 * count].clone(), tables[2 * count :].clone()


def conv_arguments(
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    channels: int = 24,
    width: int = 4,
    per_page: int = 16,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    initial: Sequence[bool] | bool = True,
    final: Sequence[bool] | bool = True,
    in_place: bool = False,
    checkpoints: Sequence[int] = (),
    extra_rows: int = 0,
) -> list:
    """The positional arguments of causal_conv1d; `extra_rows` of NaN follow the last sequence."""
    count = len(lengths)
    x = rows_of_projection(sum(lengths) + extra_rows, channels, dtype=dtype, seed=1)
    x[sum(lengths) :] = float("nan")
    cache, read, written, spare = entries(max(count, len(checkpoints)), (width, per_page), channels, per_page, dtype)
    read, written = (read if in_place else read[:count]), (read if in_place else written)[:count].clone()
    read = read[:count].clone()
    _absent(read, initial)
    _absent(written, final)
    return [
        x,
        randn(channels, width, dtype=dtype, seed=2, scale=0.5),
        randn(channels, dtype=dtype, seed=3) if bias else None,
        cu_seqlens(lengths),
        ints(starts if starts is not None else [3 * r + 1 for r in range(count)]),
        cache,
        read,
        written,
        ints(checkpoints),
        spare[: len(checkpoints)],
    ]


def _absent(table: Tensor, present: Sequence[bool] | bool) -> None:
    for r in range(len(table)):
        if not (present if isinstance(present, bool) else present[r]):
            table[r] = -1


def scan_arguments(
    lengths: Sequence[int],
    starts: Sequence[int] | None = None,
    chunk: int = 16,
    heads: int = 4,
    head_dim: int = 16,
    groups: int = 2,
    d_state: int = 16,
    per_page: int = 3,
    dtype: torch.dtype = torch.float32,
    D: bool = True,
    dt_bias: bool = True,
    initial: Sequence[bool] | bool = True,
    final: Sequence[bool] | bool = True,
    in_place: bool = False,
    checkpoints: Sequence[int] = (),
    extra_rows: int = 0,
) -> list:
    """The positional arguments of ssd_scan; `extra_rows` of NaN follow the last sequence."""
    count, tokens = len(lengths), sum(lengths)
    xBC = rows_of_projection(tokens + extra_rows, heads * head_dim + 2 * groups * d_state, dtype=dtype, seed=1)
    dt = rows_of_projection(tokens + extra_rows, heads, dtype=dtype, seed=2)
    xBC[tokens:], dt[tokens:] = float("nan"), float("nan")
    x, B, C = xBC.split([heads * head_dim, groups * d_state, groups * d_state], dim=1)
    shape = (per_page, head_dim, d_state)
    cache, read, written, spare = entries(max(count, len(checkpoints)), shape, heads, per_page, torch.float32)
    written = (read if in_place else written)[:count].clone()
    read = read[:count].clone()
    _absent(read, initial)
    _absent(written, final)
    return [
        x.unflatten(1, (heads, head_dim)),
        dt,
        torch.linspace(1, 16, heads).log().to(x.device),
        B.unflatten(1, (groups, d_state)),
        C.unflatten(1, (groups, d_state)),
        randn(heads, seed=3) if D else None,
        randn(heads, seed=4) - 2 if dt_bias else None,
        cu_seqlens(lengths),
        ints(starts if starts is not None else [7 * r for r in range(count)]),
        chunk,
        cache,
        read,
        written,
        ints(checkpoints),
        spare[: len(checkpoints)],
    ]


def update_arguments(
    positions: Sequence[int],
    heads: int = 4,
    head_dim: int = 16,
    groups: int = 2,
    d_state: int = 16,
    width: int = 4,
    channels_per_page: int = 40,
    heads_per_page: int = 3,
    dtype: torch.dtype = torch.float32,
    conv_bias: bool = True,
    D: bool = True,
    dt_bias: bool = True,
    initial: Sequence[bool] | bool = True,
    live: Sequence[bool] | bool = True,
    in_place: bool = False,
) -> list:
    """The positional arguments of state_update."""
    count = len(positions)
    channels = heads * head_dim + 2 * groups * d_state
    conv = entries(count, (width, channels_per_page), channels, channels_per_page, dtype, seed=1)
    state = entries(count, (heads_per_page, head_dim, d_state), heads, heads_per_page, torch.float32, seed=2)
    tables = []
    for cache, read, written, _ in (conv, state):
        written = read.clone() if in_place else written
        _absent(read, initial)
        _absent(written, live)
        tables.append((cache, read, written))
    projection = rows_of_projection(count, heads * head_dim + channels + heads, dtype=dtype, seed=3)
    z, xBC, dt = projection.split([heads * head_dim, channels, heads], dim=1)
    return [
        xBC,
        z,
        dt,
        randn(channels, width, dtype=dtype, seed=4, scale=0.5),
        randn(channels, dtype=dtype, seed=5) if conv_bias else None,
        torch.linspace(1, 16, heads).log().to(xBC.device),
        randn(heads, seed=6) if D else None,
        randn(heads, seed=7) - 2 if dt_bias else None,
        ints(positions),
        *tables[0],
        *tables[1],
    ]


def reverse_programs(monkeypatch) -> None:
    """Run the programs of every launch from last to first, as a GPU might: the results must be the same."""
    if not INTERPRETED:
        pytest.skip("a GPU chooses the order itself")
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx

    def backwards(*index):
        forwards(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
