"""One step through the layers: gate, split, branches, merge (§5.1), for decodes and slices of prefills together.

The gate of a layer needs every prompt token's input to that layer, so a prompt cannot be cut into token chunks that
each run through all layers. It is cut the other way: a slice is a token range of one layer, and a layer is entered
when the layer before has done all rows. Decodes pass all layers in every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import dispatch
from ..models.packed import PackedLayer, PackedModel
from .batch import PrefillSlice, RouteSplit, StepBatch
from .branches import BranchCoordinator
from .memory import PagePool
from .profiling import BranchLoad
from .request import PrefillProgress, Request
from .tables import RequestTables


@dataclass
class _Rows:
    """The packed rows between two layers: decodes, then slices.

    h: [T, hidden_size], the residual stream.  delta: the FFN's output that has yet to be added, or None.
    u: the normalised input of the next layer where it is known already, or None.
    """

    slices: tuple[PrefillSlice, ...]
    h: Tensor
    delta: Tensor | None = None
    u: Tensor | None = None

    def ranges(self) -> Iterator[tuple[PrefillSlice, slice]]:
        """Each slice and where its rows stand; they are the last of the packed rows."""
        end = self.h.shape[0] - sum(s.end - s.start for s in self.slices)
        for s in self.slices:
            start, end = end, end + s.end - s.start
            yield s, slice(start, end)


class Executor:
    """Runs steps of a packed model over the page pool."""

    def __init__(
        self, model: PackedModel, pool: PagePool, tables: RequestTables, coordinator: BranchCoordinator | None = None
    ) -> None:
        """coordinator: runs both branches of a layer at once; None runs one after the other."""
        self.model, self.pool, self.tables, self.coordinator = model, pool, tables, coordinator
        self.device = model.embedding.device
        self.ops = dispatch.select(self.device)
        self.num_layers = len(model.layers)

    def start_prefill(self, request: Request) -> PrefillProgress:
        """Embed a prompt; its rows wait before layer 0, with the gate's rows if layer 0 has a gate to run."""
        ids = torch.tensor(request.prompt, device=self.device)
        hidden = self.model.embedding.index_select(0, ids)
        z = torch.empty(len(ids), self.model.config.gate_dim, dtype=torch.float32, device=self.device)
        first = self.model.layers[0]
        if first.gate is not None and _runs_gate(request, 0):
            z = self.ops.gate_pool(hidden, None, first.input_norm, self.model.eps, first.gate.w1)[1]
        return PrefillProgress(layer_idx=0, done_tokens=0, hidden=hidden, z=z)

    def run(
        self, decodes: list[Request], token_ids: list[int], plan: list[tuple[PrefillSlice, ...]]
    ) -> tuple[Tensor, list[Request]]:
        """One step.

        decodes: requests that append a token, token_ids: that token.  plan: the slices of each layer.
        Returns logits [n, vocab] for every decode, then for the prompt rows that want them (`first_logit_row`), and the
        requests they belong to.
        """
        ops, model = self.ops, self.model
        step = StepBatch(self.tables, np.array([r.slot for r in decodes], dtype=np.int64), self.device)
        decode_h = model.embedding.index_select(0, torch.tensor(token_ids, dtype=torch.int64, device=self.device))
        rows: _Rows | None = None
        for layer_idx, layer in enumerate(model.layers):
            slices = plan[layer_idx]
            if rows is not None and rows.slices != slices:
                self._unpack(rows)
                decode_h = rows.h[: len(decodes)]
                rows = None
            if not decodes and not slices:
                continue
            if rows is None:
                parts = [s.request.progress.hidden[s.start : s.end] for s in slices]
                rows = _Rows(slices, torch.cat([decode_h, *parts]))
            self._enter_layer(layer_idx, layer, slices)
            self._run_layer(layer_idx, layer, step, rows)
            if layer_idx + 1 < self.num_layers:
                self._collect_gate_rows(layer_idx + 1, rows)
        wanted, owners = list(range(len(decodes))), list(decodes)
        for s, where in rows.ranges() if rows is not None else ():
            skipped = max(0, s.request.first_logit_row - s.start)
            wanted.extend(range(where.start + skipped, where.stop))
            owners.extend([s.request] * (where.stop - where.start - skipped))
        if rows is None or not wanted:
            return model.embedding.new_empty(0, model.head.out_features), []
        index = torch.tensor(wanted, dtype=torch.int32, device=self.device)
        hidden = ops.split_norm(rows.h, rows.delta, model.norm, model.eps, index)
        return model.head(hidden), owners

    def _enter_layer(self, layer_idx: int, layer: PackedLayer, slices: tuple[PrefillSlice, ...]) -> None:
        """Choose the routes of the requests whose first slice enters the layer, and give them its pages."""
        entering = [s.request for s in slices if s.start == 0]
        gate, undecided = layer.gate, [r for r in entering if _runs_gate(r, layer_idx)]
        if gate is not None and undecided:
            lengths = torch.tensor([r.gate_tokens for r in undecided], device=self.device)
            z = torch.cat([r.progress.z[: r.gate_tokens] for r in undecided])
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            bias = torch.tensor([r.gate_bias for r in undecided], dtype=torch.float32, device=self.device)
            probs, routes = self.ops.gate_route(z, cu_seqlens, gate.b1, gate.w2, gate.b2, bias)
            margins = (probs[:, 0] - probs[:, 1]).abs().tolist()
            for request, route, margin in zip(undecided, routes.tolist(), margins, strict=True):
                request.routes.append(route)
                request.gate_margins.append(margin)
        for request in entering:
            if layer_idx >= len(request.routes):
                request.routes.append(request.forced[layer_idx])
                request.gate_margins.append(1.0)
            self.tables.enter_layer(request.slot, layer_idx, request.routes[layer_idx], len(request.prompt))

    def _run_layer(self, layer_idx: int, layer: PackedLayer, step: StepBatch, rows: _Rows) -> None:
        """Shared operators on the packed rows, the branches on compact rows."""
        ops, eps = self.ops, self.model.eps
        split = step.split(layer_idx, rows.slices)
        if rows.u is None:
            u = ops.split_norm(rows.h, rows.delta, layer.input_norm, eps, split.order)
        else:
            u = rows.u if split.one_route else ops.gather_rows(rows.u, split.order)
        y_attention, y_ssm = self._run_branches(layer_idx, layer, step, split, u)
        if layer.ffn is None:
            rows.delta = ops.gather_rows(torch.cat([y_attention, y_ssm]), split.inverse)
        else:
            v = ops.merge_norm(rows.h, y_attention, y_ssm, split.inverse, layer.ffn_norm, eps)
            rows.delta = layer.ffn(v, ops)
        rows.u = None

    def _run_branches(
        self, layer_idx: int, layer: PackedLayer, step: StepBatch, split: RouteSplit, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        n = split.num_attention
        if self.coordinator is not None and not split.one_route:
            assert layer.attention is not None and layer.ssm is not None, "a route that the layer does not have"
            a, s = split.attention, split.ssm
            batches = step.attention(layer_idx, a), step.ssm(layer_idx, s)
            loads = BranchLoad(a.counts, a.starts, a.num_decodes), BranchLoad(s.counts, s.starts, s.num_decodes)
            branches, cos_sin = (layer.attention, layer.ssm), self.model.cos_sin
            return self.coordinator.run(*branches, u, *batches, *loads, cos_sin=cos_sin, pool=self.pool, ops=self.ops)
        y_attention, y_ssm = u[:n], u[n:]
        if n:
            assert layer.attention is not None, "a route that the layer does not have"
            kv_rows = step.attention(layer_idx, split.attention)
            y_attention = layer.attention(y_attention, kv_rows, self.model.cos_sin, self.pool.kv_cache, self.ops)
        if n < u.shape[0]:
            assert layer.ssm is not None, "a route that the layer does not have"
            ssm_rows = step.ssm(layer_idx, split.ssm)
            y_ssm = layer.ssm(y_ssm, ssm_rows, self.pool.state_cache, self.pool.conv_cache, self.ops)
        return y_attention, y_ssm

    def _collect_gate_rows(self, next_idx: int, rows: _Rows) -> None:
        """Where a request's next layer has a gate to run, keep the rows z that leave for it."""
        layer = self.model.layers[next_idx]
        if layer.gate is None or not any(_runs_gate(s.request, next_idx) for s in rows.slices):
            return
        rows.u, z = self.ops.gate_pool(rows.h, rows.delta, layer.input_norm, self.model.eps, layer.gate.w1)
        rows.delta = None
        for s, where in rows.ranges():
            if _runs_gate(s.request, next_idx):
                s.request.progress.z[s.start : s.end] = z[where]

    def _unpack(self, rows: _Rows) -> None:
        """The prefills' rows back to their requests' buffers."""
        if rows.delta is not None:
            rows.h.add_(rows.delta)
        for s, where in rows.ranges():
            s.request.progress.hidden[s.start : s.end] = rows.h[where]


def _runs_gate(request: Request, layer_idx: int) -> bool:
    """Whether the request's route at the layer is still to be chosen by the gate."""
    return request.forced[layer_idx] < 0 and len(request.routes) <= layer_idx
