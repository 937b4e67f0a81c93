"""Argument checks of the public operators: shapes, dtypes, strides and devices always, index values where cheap.

One function per operator, with the operator's arguments; each raises ValueError with the argument's name, what it is
and what is allowed, and has no effect otherwise. Values of index tensors are read on the CPU, and on other devices
where the environment has FLEXOPS_DEBUG=1, because reading them waits for the device.
"""

import os
from bisect import bisect_right
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .tensors import describe, dtype_name, rows_contiguous

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_ALL = (*_LOW, torch.float64)
_INT32, _INT64, _INDEX = (torch.int32,), (torch.int64,), (torch.int32, torch.int64)
_SAME, _FLOAT, _STATE = "as the first", "floating", "state"


class _Arguments:
    """The arguments of one call: dims get their size where their name is first seen, and must agree after."""

    def __init__(self, name: str, first: Tensor, dims: str) -> None:
        self.sizes: dict[str, int] = {}
        self.first, self.device, self.dtype = name, first.device, first.dtype
        self.is_double = first.dtype == torch.float64
        self.reads_values = first.device.type == "cpu" or os.environ.get("FLEXOPS_DEBUG") == "1"
        self.tensor(name, first, dims, _ALL)

    def tensor(
        self, name: str, x: Tensor, dims: str, dtypes: tuple[torch.dtype, ...] | str, dense: bool = False
    ) -> None:
        """Check that x is [dims], of one of the dtypes, and contiguous; rows may lie apart unless `dense`."""
        names, sizes, shape = dims.split(), self.sizes, x.shape
        if len(names) != len(shape):
            self._refuse(name, x, f"{len(names)} dims [{', '.join(names)}]")
        for dim, size in zip(names, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                known = ", ".join(f"{d}={sizes[d]}" for d in names if d in sizes)
                self._refuse(name, x, f"shape [{', '.join(names)}] with {known}, as the arguments before it say")
        if isinstance(dtypes, str):
            dtypes = self._dtypes(dtypes)
        if x.dtype not in dtypes:
            self._refuse(name, x, "dtype " + " or ".join(map(dtype_name, dtypes)))
        if x.device != self.device:
            self._refuse(name, x, f"the device of {self.first}, {self.device}")
        loose = x.dim() > 1 and not dense
        if not x.is_contiguous() and not (loose and rows_contiguous(x)):
            self._refuse(
                name, x, "contiguous memory" + (", where only dim 0 may have a larger stride" if loose else "")
            )

    def optional(self, name: str, x: Tensor | None, dims: str, dtypes: tuple[torch.dtype, ...] | str) -> None:
        if x is not None:
            self.tensor(name, x, dims, dtypes)

    def bind(self, **sizes: int) -> None:
        """Give dims a size that follows from others."""
        self.sizes.update(sizes)

    def values(self, name: str, x: Tensor, low: int, high: int) -> None:
        """Check that every value of an index tensor lies in [low, high), where values are read."""
        if not self.reads_values or x.numel() == 0:
            return
        least, most = (int(v) for v in torch.aminmax(x))
        if least < low or most >= high:
            bad = least if least < low else most
            raise ValueError(f"{name}: holds {bad}; allowed: {low} to {high - 1}")

    def once(self, name: str, x: Tensor) -> None:
        """Check that x names no place twice, where values are read: of two writes to one place, either may stay."""
        if not self.reads_values or x.numel() < 2:
            return
        ordered = np.sort(x.cpu().numpy(), axis=None)
        named = ordered[ordered.searchsorted(0) :]
        twice = named[1:][named[1:] == named[:-1]]
        if twice.size:
            raise ValueError(f"{name}: holds {int(twice[0])} twice; allowed: each once, but for -1")

    def cu_seqlens(self, cu_seqlens: Tensor, allow_empty: bool = True) -> None:
        """Check that cu_seqlens is int32 [R+1], rises from 0 to T, and binds R."""
        self.tensor("cu_seqlens", cu_seqlens, "R+1", _INT32, dense=True)
        self.bind(R=cu_seqlens.numel() - 1)
        if cu_seqlens.numel() == 0:
            self._refuse("cu_seqlens", cu_seqlens, "at least one element, 0")
        if not self.reads_values:
            return
        ends, total = cu_seqlens.tolist(), self.sizes["T"]
        if ends[0] != 0 or ends[-1] != total:
            raise ValueError(
                f"cu_seqlens: runs from {ends[0]} to {ends[-1]}; allowed: from 0 to the number of rows, {total}"
            )
        for r, (start, end) in enumerate(pairwise(ends)):
            if end < start or (end == start and not allow_empty):
                least = "0 rows" if allow_empty else "1 row"
                raise ValueError(f"cu_seqlens: sequence {r} has {end - start} rows; allowed: at least {least}")

    def between(self, name: str, value: int, low: int, high: int, multiple: int = 1) -> None:
        if not low <= value <= high or value % multiple:
            step = "" if multiple == 1 else f", multiples of {multiple}"
            raise ValueError(f"{name}: got {value}; allowed: {low} to {high}{step}")

    def divides(self, name: str, value: int, what: str, total: int) -> None:
        if value < 1 or total % value:
            raise ValueError(f"{name}: got {value}; allowed: a divisor of {what}, {total}")

    def _dtypes(self, kind: str) -> tuple[torch.dtype, ...]:
        if kind == _SAME:
            return (self.dtype,)
        if kind == _STATE:
            return (torch.float64,) if self.is_double else (torch.float32,)
        return _ALL if self.is_double else _LOW

    def _refuse(self, name: str, x: Tensor, allowed: str) -> None:
        raise ValueError(f"{name}: got {describe(x)}; allowed: {allowed}")


# --- norms and activation -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    args = _Arguments("x", x, "T D")
    args.tensor("weight", weight, "D", _FLOAT)


def silu_mul(gate: Tensor, up: Tensor) -> None:
    args = _Arguments("gate", gate, "T F")
    args.tensor("up", up, "T F", _SAME)


def gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, n_groups: int) -> None:
    args = _Arguments("x", x, "T D")
    args.optional("gate", gate, "T D", _SAME)
    args.tensor("weight", weight, "D", _FLOAT)
    args.divides("n_groups", n_groups, "the row length", x.shape[1])


def finish_gated_norm(x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int) -> None:
    args = _Arguments("x", x, "T D")
    args.tensor("sum_squares", sum_squares, "T H", _STATE)
    args.tensor("weight", weight, "D", _FLOAT)
    args.divides("n_groups", n_groups, "the number of heads", sum_squares.shape[1])
    args.divides("n_groups", n_groups, "the row length", x.shape[1])


# --- gate -----------------------------------------------------------------------------------------------------


def gate_pool(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, w1: Tensor) -> None:
    args = _Arguments("residual", residual, "T D")
    args.optional("delta", delta, "T D", _SAME)
    args.tensor("weight", weight, "D", _FLOAT)
    args.tensor("w1", w1, "E D", _FLOAT, dense=True)


def gate_route(z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor | None) -> None:
    args = _Arguments("z", z, "T E")
    args.tensor("z", z, "T E", _STATE)
    args.cu_seqlens(cu_seqlens, allow_empty=False)
    args.tensor("b1", b1, "E", _FLOAT)
    args.bind(routes=2)
    args.tensor("w2", w2, "routes E", _FLOAT, dense=True)
    args.tensor("b2", b2, "routes", _FLOAT)
    args.optional("bias", bias, "R", _FLOAT)


# --- split and merge ------------------------------------------------------------------------------------------


def gather_rows(x: Tensor, index: Tensor) -> None:
    args = _Arguments("x", x, "T D")
    args.tensor("index", index, "M", _INDEX)
    args.values("index", index, -1, x.shape[0])


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> None:
    args = _Arguments("out", out, "T D")
    args.tensor("x", x, "M D", _SAME)
    args.tensor("index", index, "M", _INDEX)
    args.values("index", index, -1, out.shape[0])
    args.once("index", index)


def split_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor) -> None:
    args = _Arguments("residual", residual, "T D")
    args.optional("delta", delta, "T D", _SAME)
    args.tensor("weight", weight, "D", _FLOAT)
    args.tensor("order", order, "M", _INT32)
    args.values("order", order, -1, residual.shape[0])
    args.once("order", order)


def merge_norm(
    residual: Tensor, y_attention: Tensor, y_ssm: Tensor, inverse: Tensor, weight: Tensor, eps: float
) -> None:
    args = _Arguments("residual", residual, "T D")
    args.tensor("y_attention", y_attention, "Ma D", _SAME)
    args.tensor("y_ssm", y_ssm, "Ms D", _SAME)
    args.tensor("inverse", inverse, "T", _INT32)
    args.tensor("weight", weight, "D", _FLOAT)
    args.values("inverse", inverse, -1, y_attention.shape[0] + y_ssm.shape[0])


# --- attention ------------------------------------------------------------------------------------------------


def _rope(args: _Arguments, cos_sin: Tensor, positions: Tensor, head_dim: int) -> None:
    args.tensor("cos_sin", cos_sin, "max_position rotary_dim", _FLOAT, dense=True)
    args.between("rotary_dim of cos_sin", cos_sin.shape[1], 2, head_dim, multiple=2)
    args.tensor("positions", positions, "T", _INT32)
    args.values("positions", positions, 0, cos_sin.shape[0])


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    args = _Arguments("x", x, "T heads d")
    _rope(args, cos_sin, positions, x.shape[2])


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    args = _Arguments("q", q, "T Hq d")
    args.between("head_dim of q", q.shape[2], 8, 256, multiple=8)
    args.tensor("k", k, "T Hk d", _SAME)
    args.tensor("v", v, "T Hk d", _SAME)
    if cos_sin is not None:
        _rope(args, cos_sin, positions, q.shape[2])
    args.tensor("positions", positions, "T", _INT32)
    _kv_cache(args, kv_cache)
    args.tensor("slot_mapping", slot_mapping, "T", _INT64)
    args.values("slot_mapping", slot_mapping, -1, kv_cache.shape[0] * kv_cache.shape[3])
    args.once("slot_mapping", slot_mapping)


def _kv_cache(args: _Arguments, kv_cache: Tensor) -> None:
    args.bind(two=2)
    args.tensor("kv_cache", kv_cache, "num_pages two Hk page_tokens d", _SAME)
    args.divides("Hk, the kv heads of kv_cache,", kv_cache.shape[2], "the query heads", args.sizes["Hq"])


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
) -> None:
    args = _Arguments("q", q, "T Hq d")
    args.between("head_dim of q", q.shape[2], 8, 256, multiple=8)
    _kv_cache(args, kv_cache)
    args.cu_seqlens(cu_seqlens)
    args.tensor("page_table", page_table, "R pages", _INT32)
    args.tensor("context_lens", context_lens, "R", _INT32)
    if not args.reads_values or args.sizes["R"] == 0:
        return
    page_tokens = kv_cache.shape[3]
    query_lens = cu_seqlens.diff()
    longest = int(query_lens.max())
    if max_query_len < longest:
        raise ValueError(f"max_query_len: got {max_query_len}; allowed: at least the longest query, {longest}")
    for r, (context, query) in enumerate(zip(context_lens.tolist(), query_lens.tolist(), strict=True)):
        padding = query == 1 and context == 0
        if query and not padding and not query <= context <= page_table.shape[1] * page_tokens:
            raise ValueError(
                f"context_lens: request {r} has {context}; allowed: from its {query} queries to the "
                f"{page_table.shape[1]} pages of {page_tokens} tokens in page_table, or 0 for one query of padding"
            )
    first_token = torch.arange(0, page_table.shape[1] * page_tokens, page_tokens, device=q.device)
    used = (first_token < context_lens.unsqueeze(-1)) & (query_lens > 0).unsqueeze(-1)
    args.values("page_table within context_lens", page_table[used], 0, kv_cache.shape[0])


# --- SSM ------------------------------------------------------------------------------------------------------


def _sequence_caches(
    args: _Arguments,
    cache_name: str,
    cache: Tensor | None,
    pages_needed: int,
    initial_pages: Tensor | None,
    final_pages: Tensor | None,
    checkpoint_rows: Tensor | None,
    checkpoint_pages: Tensor | None,
) -> None:
    tables = {"initial_pages": initial_pages, "final_pages": final_pages, "checkpoint_pages": checkpoint_pages}
    if cache is None:
        given = [name for name, table in tables.items() if table is not None]
        if given:
            raise ValueError(f"{given[0]}: given without {cache_name}; allowed: both or neither")
        return
    if (checkpoint_rows is None) != (checkpoint_pages is None):
        raise ValueError("checkpoint_rows: allowed together with checkpoint_pages, both or neither")
    args.bind(pages=pages_needed)
    for name, table in tables.items():
        if table is not None:
            args.tensor(name, table, "S pages" if name == "checkpoint_pages" else "R pages", _INT32)
            _entries(args, name, table, cache.shape[0], written=name != "initial_pages")
    if checkpoint_rows is not None:
        args.tensor("checkpoint_rows", checkpoint_rows, "S", _INT32)
        args.values("checkpoint_rows", checkpoint_rows, 0, args.sizes["T"])
        args.once("checkpoint_rows", checkpoint_rows)


def _entries(args: _Arguments, name: str, table: Tensor, num_pages: int, written: bool) -> None:
    """Rows of pages: all of them in range, or the first is -1 and the entry absent; none twice if `written`."""
    args.values(name, table, -1, num_pages)
    if args.reads_values and bool(((table < 0).any(-1) & (table[:, 0] >= 0)).any()):
        raise ValueError(f"{name}: a row has -1 behind its first page; allowed: -1 first (no entry), or no -1")
    if written:
        args.once(name, table)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    conv_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
) -> None:
    args = _Arguments("x", x, "T C")
    args.tensor("weight", weight, "C K", _FLOAT, dense=True)
    args.between("K, the width of weight", weight.shape[1], 2, 4)
    args.optional("bias", bias, "C", _FLOAT)
    args.cu_seqlens(cu_seqlens)
    args.tensor("seq_starts", seq_starts, "R", _INT32)
    args.values("seq_starts", seq_starts, 0, 2**31)
    if conv_cache is not None:
        args.tensor("conv_cache", conv_cache, "num_pages K channels_per_page", _SAME)
    needed = 0 if conv_cache is None else -(-x.shape[1] // conv_cache.shape[2])
    tables = (initial_pages, final_pages, checkpoint_rows, checkpoint_pages)
    _sequence_caches(args, "conv_cache", conv_cache, needed, *tables)


def _heads(args: _Arguments, head_dim: int, d_state: int, num_heads: int, n_groups: int) -> None:
    args.between("head dim P", head_dim, 8, 256, multiple=8)
    args.between("state size N", d_state, 16, 256)
    args.divides("n_groups G", n_groups, "the number of heads H", num_heads)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    chunk_size: int,
    state_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
) -> None:
    args = _Arguments("x", x, "T H P")
    args.tensor("dt", dt, "T H", _FLOAT)
    args.tensor("A_log", A_log, "H", _FLOAT)
    args.tensor("B", B, "T G N", _SAME)
    args.tensor("C", C, "T G N", _SAME)
    args.optional("D", D, "H", _FLOAT)
    args.optional("dt_bias", dt_bias, "H", _FLOAT)
    _heads(args, x.shape[2], B.shape[2], x.shape[1], B.shape[1])
    args.cu_seqlens(cu_seqlens)
    args.tensor("seq_starts", seq_starts, "R", _INT32)
    args.values("seq_starts", seq_starts, 0, 2**31)
    if chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: got {chunk_size}; allowed: powers of two from 16")
    if state_cache is not None:
        args.tensor("state_cache", state_cache, "num_pages heads_per_page P N", _STATE)
    needed = 0 if state_cache is None else -(-x.shape[1] // state_cache.shape[1])
    tables = (initial_pages, final_pages, checkpoint_rows, checkpoint_pages)
    _sequence_caches(args, "state_cache", state_cache, needed, *tables)
    if checkpoint_rows is not None and args.reads_values:
        _chunk_ends(checkpoint_rows.tolist(), cu_seqlens.tolist(), seq_starts.tolist(), chunk_size)


def _chunk_ends(rows: list[int], ends: list[int], starts: list[int], chunk_size: int) -> None:
    """Chunked forms have a state at chunk ends and sequence ends only, and would leave other pages unwritten."""
    for row in rows:
        r = bisect_right(ends, row) - 1
        after = starts[r] + row + 1 - ends[r]
        if after % chunk_size and row + 1 != ends[r + 1]:
            raise ValueError(
                f"checkpoint_rows: row {row} is followed by position {after} of request {r}; allowed: rows before a "
                f"multiple of chunk_size, {chunk_size}, and last rows"
            )


def state_update(
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
) -> None:
    args = _Arguments("xBC", xBC, "R C")
    args.tensor("z", z, "R H*P", _SAME)
    args.tensor("dt", dt, "R H", _FLOAT)
    args.tensor("conv_weight", conv_weight, "C K", _FLOAT, dense=True)
    args.between("K, the width of conv_weight", conv_weight.shape[1], 2, 4)
    args.optional("conv_bias", conv_bias, "C", _FLOAT)
    args.tensor("A_log", A_log, "H", _FLOAT)
    args.optional("D", D, "H", _FLOAT)
    args.optional("dt_bias", dt_bias, "H", _FLOAT)
    args.tensor("positions", positions, "R", _INT32)
    args.values("positions", positions, 0, 2**31)
    args.tensor("conv_cache", conv_cache, "num_conv_pages K channels_per_page", _SAME)
    args.tensor("state_cache", state_cache, "num_state_pages heads_per_page P N", _STATE)
    num_heads, (heads_per_page, head_dim, d_state) = A_log.numel(), state_cache.shape[1:]
    if z.shape[1] != num_heads * head_dim:
        raise ValueError(f"z: has {z.shape[1]} columns; allowed: H * P = {num_heads} * {head_dim}")
    extra = xBC.shape[1] - z.shape[1]
    if extra < 2 * d_state or extra % (2 * d_state):
        raise ValueError(f"xBC: has {xBC.shape[1]} columns; allowed: H*P + 2*G*N = {z.shape[1]} + G * {2 * d_state}")
    _heads(args, head_dim, d_state, num_heads, extra // (2 * d_state))
    args.bind(conv_pages=-(-xBC.shape[1] // conv_cache.shape[2]), state_pages=-(-num_heads // heads_per_page))
    for name, table in (("conv_pages_in", conv_pages_in), ("conv_pages_out", conv_pages_out)):
        args.tensor(name, table, "R conv_pages", _INT32)
        _entries(args, name, table, conv_cache.shape[0], written=name == "conv_pages_out")
    for name, table in (("state_pages_in", state_pages_in), ("state_pages_out", state_pages_out)):
        args.tensor(name, table, "R state_pages", _INT32)
        _entries(args, name, table, state_cache.shape[0], written=name == "state_pages_out")


def decode_branches(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
) -> None:
    args = _Arguments("q", q, "Ra Hq d")
    args.tensor("xBC", xBC, "Rs C", _SAME)
    rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    paged_attention(q, kv_cache, page_table, rows, context_lens, scale, 1)
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions)
    caches = (conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out)
    state_update(*ssm, *caches)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> None:
    args = _Arguments("q", q, "T Hq d")
    args.tensor("k", k, "T Hk d", _SAME)
    args.tensor("v", v, "T Hk d", _SAME)
    args.divides("Hk, the heads of k,", k.shape[1], "the query heads", q.shape[1])
    args.cu_seqlens(cu_seqlens)
