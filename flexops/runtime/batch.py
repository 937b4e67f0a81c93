"""Index tensors of a step: which packed rows belong to whom, and how a layer splits them between its branches."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels import ATTENTION, SSM
from ..models.packed import AttentionBatch, SSMBatch
from .request import Request
from .tables import RequestTables


@dataclass(frozen=True)
class PrefillSlice:
    """Rows [start, end) of a request's prompt, to pass one layer in this step."""

    request: Request
    start: int
    end: int


@dataclass(frozen=True)
class BranchRows:
    """The requests of one branch, in packed order, and their rows.

    slots: int64 [R].  counts, starts: int32 [R], rows of each request in the step and the absolute position of the
    first.  num_decodes: the leading requests that decode.
    """

    slots: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    num_decodes: int

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """int32 [R+1]."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    @cached_property
    def row_request(self) -> np.ndarray:
        """int64 [T], the request of each row."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 [T], the absolute position of each row."""
        offsets = np.arange(self.cu_seqlens[-1]) - self.cu_seqlens[self.row_request]
        return (self.starts[self.row_request] + offsets).astype(np.int32)


@dataclass(frozen=True)
class RouteSplit:
    """How the packed rows of one layer group are split and merged; layers with equal rows and routes share it.

    order: int32 [T], the packed row of each compact row, attention rows first.  inverse: int32 [T], the compact row of
    each packed row.  num_attention: attention rows.  one_route: nothing to split, order is the identity.
    """

    attention: BranchRows
    ssm: BranchRows
    order: Tensor
    inverse: Tensor
    num_attention: int
    one_route: bool


class StepBatch:
    """The rows of one step: a token of every decoding slot, then the prefill slices of the layer at hand."""

    def __init__(self, tables: RequestTables, decode_slots: np.ndarray, device: torch.device) -> None:
        self.tables = tables
        self.decode_slots = decode_slots
        self.device = device
        self._splits: dict[tuple, RouteSplit] = {}

    def split(self, layer_idx: int, slices: tuple[PrefillSlice, ...]) -> RouteSplit:
        """The layer's split, built once for every group of layers that share rows and routes."""
        slots = np.concatenate([self.decode_slots, [s.request.slot for s in slices]]).astype(np.int64)
        routes = self.tables.routes[layer_idx, slots]
        key = (routes.tobytes(), slices)
        if key not in self._splits:
            self._splits[key] = self._make_split(slots, routes, slices)
        return self._splits[key]

    def _make_split(self, slots: np.ndarray, routes: np.ndarray, slices: tuple[PrefillSlice, ...]) -> RouteSplit:
        n = len(self.decode_slots)
        counts = np.ones(len(slots), dtype=np.int32)
        starts = self.tables.context[slots]
        counts[n:] = [s.end - s.start for s in slices]
        starts[n:] = [s.start for s in slices]
        row_routes = np.repeat(routes, counts)
        branches, rows = [], []
        for route in (ATTENTION, SSM):
            mine = routes == route
            branches.append(BranchRows(slots[mine], counts[mine], starts[mine], int(mine[:n].sum())))
            rows.append(np.flatnonzero(row_routes == route))
        order = np.concatenate(rows)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return RouteSplit(
            attention=branches[0],
            ssm=branches[1],
            order=self._tensor(order, np.int32),
            inverse=self._tensor(inverse, np.int32),
            num_attention=len(rows[0]),
            one_route=not (len(rows[0]) and len(rows[1])),
        )

    def attention(self, layer_idx: int, rows: BranchRows) -> AttentionBatch:
        """The attention branch's batch in one layer."""
        page_tokens = self.tables.layout.page_tokens
        context = rows.starts + rows.counts
        columns = -(-int(context.max()) // page_tokens)
        table = self.tables.kv_pages[layer_idx, rows.slots, :columns]
        pages = table[rows.row_request, rows.positions // page_tokens].astype(np.int64)
        return AttentionBatch(
            positions=self._tensor(rows.positions, np.int32),
            slot_mapping=self._tensor(pages * page_tokens + rows.positions % page_tokens, np.int64),
            page_table=self._tensor(table, np.int32),
            cu_seqlens=self._tensor(rows.cu_seqlens, np.int32),
            context_lens=self._tensor(context, np.int32),
            num_decodes=rows.num_decodes,
            max_prefill=int(rows.counts[rows.num_decodes :].max(initial=0)),
        )

    def ssm(self, layer_idx: int, rows: BranchRows) -> SSMBatch:
        """The SSM branch's batch in one layer. A range that starts a prompt starts from nothing, however short."""
        n = rows.num_decodes
        state_pages = self.tables.state_pages[layer_idx, rows.slots]
        conv_pages = self.tables.conv_pages[layer_idx, rows.slots]
        starts = rows.starts[n:]
        fresh = (starts == 0)[:, None]
        return SSMBatch(
            num_decodes=n,
            positions=self._tensor(rows.starts[:n], np.int32),
            state_pages=self._tensor(state_pages, np.int32),
            conv_pages=self._tensor(conv_pages, np.int32),
            cu_seqlens=self._tensor(rows.cu_seqlens[n:] - n, np.int32),
            seq_starts=self._tensor(starts, np.int32),
            initial_state_pages=self._tensor(np.where(fresh, -1, state_pages[n:]), np.int32),
            initial_conv_pages=self._tensor(np.where(fresh, -1, conv_pages[n:]), np.int32),
        )

    def _tensor(self, array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(self.device)
