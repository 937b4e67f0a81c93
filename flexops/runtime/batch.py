"""Index tensors of a step: which packed rows belong to whom, and how a layer splits them between its branches."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels import ATTENTION, SSM
from ..models.packed import AttentionBatch, SSMBatch
from .request import Request, StageKind
from .tables import RequestTables


def on_device(values: np.ndarray | list[int], dtype: type, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor, without waiting for the device.

    A plain copy to a GPU ends with the stream's work; from page-locked memory it is queued, and the host goes on.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True)
class PrefillSlice:
    """Rows [start, end) of a request's prompt, to pass one layer in this step. first: they are its stage's first."""

    request: Request
    start: int
    end: int
    kind: StageKind
    first: bool


@dataclass(frozen=True)
class BranchRows:
    """The requests of one branch in one layer group, in packed order, and where their rows lie.

    slots: int64 [R].  counts, starts: int32 [R], rows of each request in the step and the absolute position of the
    first.  slices: of the requests behind those that decode.  device: where tensors go; they are made once per group.
    """

    slots: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    slices: tuple[PrefillSlice, ...]
    device: torch.device

    @classmethod
    def of_slices(cls, slices: tuple[PrefillSlice, ...], device: torch.device) -> "BranchRows":
        """Prefill rows alone."""
        slots = np.array([s.request.slot for s in slices], dtype=np.int64)
        counts = np.array([s.end - s.start for s in slices], dtype=np.int32)
        starts = np.array([s.start for s in slices], dtype=np.int32)
        return cls(slots, counts, starts, slices, device)

    @property
    def num_decodes(self) -> int:
        """The leading requests, which decode."""
        return len(self.slots) - len(self.slices)

    @cached_property
    def context(self) -> np.ndarray:
        """int32 [R], tokens in the cache once the rows are appended."""
        return self.starts + self.counts

    @cached_property
    def row_request(self) -> np.ndarray:
        """int64 [T], the request of each row."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 [T], the absolute position of each row."""
        if self.num_decodes == len(self.slots):
            return self.starts
        first_row = np.cumsum(self.counts) - self.counts
        return (np.arange(len(self.row_request)) + (self.starts - first_row)[self.row_request]).astype(np.int32)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [R+1]."""
        return self.tensor(np.concatenate([[0], np.cumsum(self.counts)]), np.int32)

    @cached_property
    def prefill_cu_seqlens(self) -> Tensor:
        """int32, of the rows behind the decodes."""
        if not self.num_decodes:
            return self.cu_seqlens
        return self.tensor(np.concatenate([[0], np.cumsum(self.counts[self.num_decodes :])]), np.int32)

    @cached_property
    def positions_tensor(self) -> Tensor:
        return self.tensor(self.positions, np.int32)

    @cached_property
    def context_tensor(self) -> Tensor:
        return self.tensor(self.context, np.int32)

    @cached_property
    def starts_tensor(self) -> Tensor:
        return self.tensor(self.starts, np.int32)

    def tensor(self, array: np.ndarray, dtype: type) -> Tensor:
        """An array as a tensor on the step's device."""
        return on_device(array, dtype, self.device)


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

    def __init__(
        self, tables: RequestTables, decode_slots: np.ndarray, device: torch.device, advances: bool = False
    ) -> None:
        """advances: it is to serve further steps of the same decodes (`advance`)."""
        self.tables = tables
        self.decode_slots = decode_slots
        self.device = device
        self._advances = advances
        # kept where it advances: launches that are replayed know the places of the tensors
        self._attention: list[tuple[int, BranchRows, AttentionBatch]] = []
        self._ssm: list[SSMBatch] = []
        self._slots: dict[tuple[PrefillSlice, ...], np.ndarray] = {(): decode_slots}
        self._splits: dict[tuple, RouteSplit] = {}

    def split(self, layer_idx: int, slices: tuple[PrefillSlice, ...]) -> RouteSplit:
        """The layer's split, built once for every group of layers that share rows and routes."""
        if slices not in self._slots:
            prefill_slots = np.array([s.request.slot for s in slices], dtype=np.int64)
            self._slots[slices] = np.concatenate([self.decode_slots, prefill_slots])
        slots = self._slots[slices]
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
            of_branch = tuple(s for s, taken in zip(slices, mine[n:].tolist(), strict=True) if taken)
            branches.append(BranchRows(slots[mine], counts[mine], starts[mine], of_branch, self.device))
            rows.append(np.flatnonzero(row_routes == route))
        order = np.concatenate(rows)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        attention, ssm = branches
        return RouteSplit(
            attention=attention,
            ssm=ssm,
            order=attention.tensor(order, np.int32),
            inverse=attention.tensor(inverse, np.int32),
            num_attention=len(rows[0]),
            one_route=not (len(rows[0]) and len(rows[1])),
        )

    def attention(self, layer_idx: int, rows: BranchRows) -> AttentionBatch:
        """The attention branch's batch in one layer."""
        # a power of two or all there are, -1 behind a request's own: launches change as seldom as that
        columns = 1 << (self._columns(rows) - 1).bit_length()
        table, slot_mapping = self._kv_places(layer_idx, rows, columns)
        replayed = np.array([False] * rows.num_decodes + [s.kind is StageKind.REPLAY for s in rows.slices])
        if replayed.any():  # their keys and values are there already, on pages that others may share
            slot_mapping[replayed[rows.row_request]] = -1
        batch = AttentionBatch(
            positions=rows.positions_tensor,
            slot_mapping=rows.tensor(slot_mapping, np.int64),
            page_table=rows.tensor(table, np.int32),
            cu_seqlens=rows.cu_seqlens,
            context_lens=rows.context_tensor,
            num_decodes=rows.num_decodes,
            max_prefill=int(rows.counts[rows.num_decodes :].max(initial=0)),
            prefill_cu_seqlens=rows.prefill_cu_seqlens if rows.slices else None,
        )
        if self._advances:
            self._attention.append((layer_idx, rows, batch))
        return batch

    def _columns(self, rows: BranchRows) -> int:
        """Pages of the longest request."""
        return -(-int(rows.context.max()) // self.tables.layout.page_tokens)

    def _kv_places(self, layer_idx: int, rows: BranchRows, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [R, columns], the requests' KV pages in one layer, and int64 [T], the slot that each row goes to."""
        page_tokens = self.tables.layout.page_tokens
        table = self.tables.kv_pages[layer_idx, rows.slots, :columns]
        column, offset = np.divmod(rows.positions, page_tokens)
        return table, table[rows.row_request, column].astype(np.int64) * page_tokens + offset

    def advance(self) -> bool:
        """The same decodes at a later token: every index tensor changes in place.

        Positions and context lengths share memory with their arrays, page tables and slots are copied.
        False where a page table would have to be wider than its tensor: then make another batch.
        """
        page_tokens, turning = self.tables.layout.page_tokens, False
        for split in self._splits.values():
            for rows in (split.attention, split.ssm):
                if not len(rows.slots):
                    continue
                now = self.tables.context[rows.slots]
                turning |= bool((now // page_tokens != rows.starts // page_tokens).any())
                rows.starts[:] = now
                np.add(now, 1, out=rows.context)
        if turning and any(self._columns(rows) > batch.page_table.shape[1] for _, rows, batch in self._attention):
            return False
        for layer_idx, rows, batch in self._attention:
            slot_mapping = batch.slot_mapping.numpy()
            if turning:  # some go on to another page
                table, slot_mapping[:] = self._kv_places(layer_idx, rows, batch.page_table.shape[1])
                batch.page_table.numpy()[:] = table
            else:
                slot_mapping += rows.positions % page_tokens - slot_mapping % page_tokens
        return True

    def ssm(self, layer_idx: int, rows: BranchRows) -> SSMBatch:
        """The SSM branch's batch in one layer.

        A range goes on from its request's own state, one that starts the prompt from nothing, one that follows a
        cached prefix from the cache's state; a replay works on the scratch state.
        """
        n, num_state = rows.num_decodes, self.tables.layout.state_pages
        states = self.tables.state_pages[layer_idx, rows.slots]
        windows = self.tables.conv_pages[layer_idx, rows.slots]
        read = np.concatenate([states[n:], windows[n:]], axis=1)
        checkpoints: list[tuple[int, np.ndarray]] = []
        row = 0
        for i, s in enumerate(rows.slices):
            progress = s.request.progress
            if s.kind is StageKind.REPLAY:
                scratch = self.tables.scratch[rows.slots[n + i]]
                states[n + i], windows[n + i], read[i] = scratch[:num_state], scratch[num_state:], scratch
            if not s.start:
                read[i] = -1
            elif s.first and (layer_idx, s.kind) in progress.read:
                read[i] = progress.read[layer_idx, s.kind]
            if progress.reuse is not None and s.kind is not StageKind.REPLAY:
                captured = progress.reuse.captures.states.get(layer_idx, {})
                found = ((p, pages) for p, pages in captured.items() if s.start < p <= s.end)
                checkpoints += [(row + p - s.start - 1, pages) for p, pages in found]
            row += s.end - s.start
        checkpoint_rows = checkpoint_pages = None
        if checkpoints:
            checkpoint_rows = rows.tensor(np.array([r for r, _ in checkpoints]), np.int32)
            checkpoint_pages = rows.tensor(np.stack([pages for _, pages in checkpoints]), np.int32)
        batch = SSMBatch(
            num_decodes=n,
            positions=rows.starts_tensor[:n],
            state_pages=rows.tensor(states, np.int32),
            conv_pages=rows.tensor(windows, np.int32),
            cu_seqlens=rows.prefill_cu_seqlens,
            seq_starts=rows.starts_tensor[n:],
            initial_state_pages=rows.tensor(read[:, :num_state], np.int32),
            initial_conv_pages=rows.tensor(read[:, num_state:], np.int32),
            checkpoint_rows=checkpoint_rows,
            checkpoint_pages=checkpoint_pages,
        )
        if self._advances:
            self._ssm.append(batch)
        return batch
