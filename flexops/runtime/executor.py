"""One step through the layers: gate, split, branches, merge (§5.1), for decodes and slices of prefills together.

The gate of a layer needs every prompt token's input to that layer, so a prompt cannot be cut into token chunks that
each run through all layers. It is cut the other way: a slice is a token range of one layer, and a layer is entered
when the layer before has done all rows. Decodes pass all layers in every step.

A prompt with a cached prefix starts behind it. At each layer it asks how to enter (`PrefixReuse.move`); where the cache
has nothing for the route, rows of the prefix become active again, and the prompt goes on in the next step.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import ATTENTION, SSM, dispatch
from ..kernels.cpu_replay import Recording, record
from ..models.packed import PackedLayer, PackedModel
from .batch import BranchRows, PrefillSlice, RouteSplit, StepBatch, on_device
from .branches import BranchCoordinator
from .memory import PagePool
from .prefix_reuse import Move, PrefixReuse
from .profiling import BranchLoad
from .request import PrefillProgress, Request, Stage, StageKind
from .static_decode import StaticDecoder
from .tables import UNKNOWN, RequestTables

REPLAYS = 64  # sets of decodes whose steps are kept: one is enough unless layouts run as batches of their own


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


@dataclass(frozen=True)
class _Replay:
    """The layers of a decode step, to run again: its index tensors, the rows that enter and leave, the gates' rows."""

    recording: Recording
    step: StepBatch
    index: Tensor
    h: Tensor
    hidden: Tensor
    decode_z: list[tuple[int, Tensor]]


class Executor:
    """Runs steps of a packed model over the page pool."""

    def __init__(
        self,
        model: PackedModel,
        pool: PagePool,
        tables: RequestTables,
        keep_gates: bool,
        coordinator: BranchCoordinator | None = None,
        static_decode: bool = False,
    ) -> None:
        """keep_gates: collect the gate rows of generated tokens, [slots, tokens, num_layers, gate_dim] fp32.

        coordinator: runs both branches of a layer at once; None runs one after the other.  static_decode: steps of
        decodes alone make the same launches whatever their layouts (`StaticDecoder`).
        """
        self.model, self.pool, self.tables, self.coordinator = model, pool, tables, coordinator
        self.device = model.embedding.device
        self.ops = dispatch.select(self.device)
        self.num_layers = len(model.layers)
        # whether steps of decodes are recorded and replayed
        self.records = (
            self.ops.__name__ == dispatch.BACKENDS["cpu"]
            and model.head.form == "own"
            and coordinator is None
            and not static_decode
        )
        # steps of decodes: True for what has come once, False for what cannot be recorded
        self._replays: OrderedDict[tuple, _Replay | bool] = OrderedDict()
        self.gate_table: Tensor | None = None
        if keep_gates and any(layer.gate is not None for layer in model.layers):
            size = tables.routes.shape[1], 16, self.num_layers, model.config.gate_dim
            self.gate_table = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.static: StaticDecoder | None = None
        if static_decode:
            fused = coordinator is not None and coordinator.fused
            self.static = StaticDecoder(model, pool, tables, self.gate_table is not None, fused)

    def start_prefill(self, request: Request, reuse: PrefixReuse | None) -> PrefillProgress:
        """Embed what a prompt has to compute; its rows wait before layer 0, with the gate's rows if it has a gate."""
        num_tokens = len(request.prompt)
        hidden = self.model.embedding.new_empty(num_tokens, self.model.embedding.shape[1])
        start = 0 if reuse is None else reuse.first_start(request.known_routes)
        stages = deque(Stage(StageKind.FULL, i, start, num_tokens) for i in range(self.num_layers))
        lowest = np.full(self.num_layers, num_tokens)
        progress = PrefillProgress(stages, start, hidden, lowest, reuse=reuse)
        request.prefill = progress
        self._load(request, 0, start, num_tokens)
        return progress

    def run(
        self, decodes: list[Request], token_ids: list[int], plan: list[tuple[PrefillSlice, ...]]
    ) -> tuple[Tensor, list[Request]]:
        """One step.

        decodes: requests that append a token, token_ids: that token.  plan: the slices of each layer.
        Returns logits [n, vocab] for every decode, then for the prompt rows that want them (`first_logit_row`), and the
        requests they belong to.
        """
        model = self.model
        slots = np.array([r.slot for r in decodes], dtype=np.int64)
        if self.static is not None and decodes and not any(plan):
            numbers = [r.replayed if r.gate_rows else -1 for r in decodes]
            self._widen_gate_table(max(numbers))
            return self.static.run(slots, token_ids, numbers, self.gate_table, self.ops), decodes
        ids = on_device(token_ids, np.int64, self.device)
        keep_z = any(r.gate_rows for r in decodes)  # gate rows of generated tokens go with those of their prompt
        modes = torch.get_num_threads(), torch.is_inference_mode_enabled()
        key = (slots.tobytes(), self.tables.version[slots].tobytes(), keep_z, *modes)
        if not any(plan):
            hidden, decode_z = self._decode(key, slots, ids, keep_z)
            owners = decodes
        elif decodes and self._replays.get(key):
            # slices pass few layers, so beside a replayed step they have little to share with the decodes
            hidden, decode_z = self._decode(key, slots, ids, keep_z)
            prefill = StepBatch(self.tables, slots[:0], self.device)
            rows, _ = self._pass_layers(prefill, hidden.new_empty(0, hidden.shape[1]), False, plan)
            prompts, owners = self._wanted_rows(rows, [])
            hidden, owners = torch.cat([hidden, prompts]), [*decodes, *owners]
        else:
            if decodes and self.records:
                self._keep(key, self._replays.get(key, True))
            step = StepBatch(self.tables, slots, self.device)
            rows, decode_z = self._pass_layers(step, model.embedding.index_select(0, ids), keep_z, plan)
            hidden, owners = self._wanted_rows(rows, decodes)
        if decode_z:
            self._keep_decode_gates(decodes, slots, decode_z)
        return model.head(hidden), owners

    def _wanted_rows(self, rows: _Rows | None, decodes: list[Request]) -> tuple[Tensor, list[Request]]:
        """The normalised rows [n, hidden_size] behind the last layer whose logits are wanted, and whose they are."""
        wanted, owners = list(range(len(decodes))), list(decodes)
        for s, where in rows.ranges() if rows is not None else ():
            skipped = max(0, s.request.first_logit_row - s.start)
            wanted.extend(range(where.start + skipped, where.stop))
            owners.extend([s.request] * (where.stop - where.start - skipped))
        if rows is None or not wanted:
            return self.model.embedding.new_empty(0, self.model.embedding.shape[1]), []
        return self._final_norm(rows, on_device(wanted, np.int32, self.device)), owners

    def _final_norm(self, rows: _Rows, index: Tensor) -> Tensor:
        return self.ops.split_norm(rows.h, rows.delta, self.model.norm, self.model.eps, index)

    def _decode(
        self, key: tuple, slots: np.ndarray, ids: Tensor, keep_z: bool
    ) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """The hidden rows [n, hidden_size] that leave a step of decodes alone, and the gates' rows as `_pass_layers`.

        On a CPU it is recorded when it comes a second time, and from then on replayed for as long as the same requests
        decode on the same pages.
        """
        known = self._replays.pop(key, None)
        if isinstance(known, _Replay) and known.step.advance():
            self._replays[key] = known
            torch.index_select(self.model.embedding, 0, ids, out=known.h)
            known.recording.replay()
            return known.hidden, known.decode_z
        h = self.model.embedding.index_select(0, ids)
        index = torch.arange(len(slots), dtype=torch.int32, device=self.device)
        again = self.records and bool(known)
        step = StepBatch(self.tables, slots, self.device, advances=again)
        nothing: list[tuple[PrefillSlice, ...]] = [()] * self.num_layers
        with record() if again else nullcontext() as finish:
            rows, decode_z = self._pass_layers(step, h, keep_z, nothing)
            assert rows is not None, "there are decodes"
            hidden = self._final_norm(rows, index)
        recording = None if finish is None else finish()
        if recording is not None:
            self._keep(key, _Replay(recording, step, index, h, hidden, decode_z))
        else:
            self._keep(key, known is None)  # what could not be recorded is not tried again
        return hidden, decode_z

    def _keep(self, key: tuple, entry: "_Replay | bool") -> None:
        """Remember a step, and forget those that cannot come again or have not come for long."""
        version = self.tables.version
        for old in [k for k in self._replays if version[np.frombuffer(k[0], dtype=np.int64)].tobytes() != k[1]]:
            del self._replays[old]
        self._replays[key] = entry
        while len(self._replays) > REPLAYS:
            self._replays.popitem(last=False)

    def _pass_layers(
        self, step: StepBatch, decode_h: Tensor, keep_z: bool, plan: list[tuple[PrefillSlice, ...]]
    ) -> tuple[_Rows | None, list[tuple[int, Tensor]]]:
        """The rows behind the last layer, None if there are none; and where keep_z, per layer with a gate the rows z of
        the decodes that enter it. decode_h: [n, hidden_size], overwritten."""
        num_decodes = decode_h.shape[0]
        decode_z: list[tuple[int, Tensor]] | None = [] if keep_z else None
        rows: _Rows | None = None
        stalled: set[Request] = set()
        for layer_idx, layer in enumerate(self.model.layers):
            planned = [s for s in plan[layer_idx] if s.request not in stalled]
            if rows is not None and rows.slices != _passing(planned):
                decode_h, rows = self._unpack(rows, num_decodes), None
            if planned:
                stalled |= self._enter_layer(layer_idx, layer, planned)
                planned = [s for s in planned if s.request not in stalled]
            slices = _passing(planned)
            if rows is not None and rows.slices != slices:
                decode_h, rows = self._unpack(rows, num_decodes), None
            refills = tuple(s for s in planned if s.kind is StageKind.REFILL)
            if refills:
                self._refill(layer_idx, layer, step, refills)
            if not num_decodes and not slices:
                continue
            if rows is None:
                parts = [s.request.progress.hidden[s.start : s.end] for s in slices]
                rows = _Rows(slices, torch.cat([decode_h, *parts]) if parts else decode_h)
                if decode_z is not None and not layer_idx:
                    self._collect_gate_rows(0, rows, decode_z)
            self._run_layer(layer_idx, layer, step, rows)
            if layer_idx + 1 < self.num_layers:
                self._collect_gate_rows(layer_idx + 1, rows, decode_z)
        return rows, decode_z or []

    def _enter_layer(self, layer_idx: int, layer: PackedLayer, slices: list[PrefillSlice]) -> set[Request]:
        """Choose the routes of the requests whose first rows enter the layer, and give them its pages.

        Returns the requests that cannot go on with the rows they have: their stages are changed, and what the step
        had planned for them from here on is void.
        """
        entering = [s.request for s in slices if s.first and s.kind is StageKind.FULL]
        entering = [r for r in entering if self.tables.routes[layer_idx, r.slot] == UNKNOWN]
        undecided = [r for r in entering if _runs_gate(r, layer_idx)]
        stalled = {r for r in undecided if not self._fill_gate_rows(layer_idx, r)}
        for request in stalled:
            assert request.reuse is not None, "only a prompt with a cached prefix lacks gate rows"
            self._turn(layer_idx, request, self._move(layer_idx, request, gated=True))
        undecided = [r for r in undecided if r not in stalled]
        gate = layer.gate
        if gate is not None and undecided:
            lengths = torch.tensor([r.gate_tokens for r in undecided], device=self.device)
            z = torch.cat([r.progress.z[layer_idx][: r.gate_tokens] for r in undecided])
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            bias = torch.tensor([r.gate_bias for r in undecided], dtype=torch.float32, device=self.device)
            probs, routes = self.ops.gate_route(z, cu_seqlens, gate.b1, gate.w2, gate.b2, bias)
            margins = (probs[:, 0] - probs[:, 1]).abs().tolist()
            for request, route, margin in zip(undecided, routes.tolist(), margins, strict=True):
                request.routes.append(route)
                request.gate_margins.append(margin)
        for request in entering:
            if request in stalled:
                continue
            if layer_idx >= len(request.routes):
                request.routes.append(request.forced[layer_idx])
                request.gate_margins.append(1.0)
            if not self._open_layer(layer_idx, request):
                stalled.add(request)
        return stalled

    def _open_layer(self, layer_idx: int, request: Request) -> bool:
        """Give a request its pages of the layer, filled from the cache. False where its rows have to change first."""
        progress, route, num_tokens = request.progress, request.routes[layer_idx], len(request.prompt)
        reuse, old_start = progress.reuse, progress.start
        if reuse is None:
            self.tables.enter_layer(request.slot, layer_idx, route, num_tokens)
            return True
        move = self._move(layer_idx, request, gated=False)
        cached = reuse.kv_pages(layer_idx, move.resume) if move.resume and route == ATTENTION else None
        self.tables.enter_layer(request.slot, layer_idx, route, num_tokens, cached, move.resume)
        if move.resume and route == SSM:
            kind = StageKind.FULL if move.resume == move.start else StageKind.REFILL
            progress.read[layer_idx, kind] = reuse.state_pages(layer_idx, move.resume)
        progress.reused_layers += move.resume > 0
        reuse.capture_hidden(layer_idx, move.start, request.routes)
        if route == SSM:
            reuse.capture_states(layer_idx, move.resume, request.routes)
        if move.resume == old_start:
            return True
        self._turn(layer_idx, request, move)
        return False

    def _move(self, layer_idx: int, request: Request, gated: bool) -> Move:
        progress = request.progress
        assert progress.reuse is not None
        return progress.reuse.move(layer_idx, request.known_routes, progress.start, gated)

    def _turn(self, layer_idx: int, request: Request, move: Move) -> None:
        """Replace a request's stages: first whatever gives the rows [resume, start), then on from this layer."""
        progress, old_start, num_tokens = request.progress, request.progress.start, len(request.prompt)
        stages: deque[Stage] = deque()
        if move.replay_layer == layer_idx:
            self._load(request, layer_idx, move.resume, old_start)
        else:
            self._load(request, move.replay_layer, move.replay_from, old_start)
            for i in range(move.replay_layer, layer_idx):
                stages.append(Stage(StageKind.REPLAY, i, move.replay_from, old_start))
                if request.routes[i] == SSM and move.replay_from:
                    assert progress.reuse is not None
                    progress.read[i, StageKind.REPLAY] = progress.reuse.state_pages(i, move.replay_from)
        if move.resume < move.start:
            stages.append(Stage(StageKind.REFILL, layer_idx, move.resume, move.start))
        stages.extend(Stage(StageKind.FULL, i, move.start, num_tokens) for i in range(layer_idx, self.num_layers))
        progress.stages, progress.done, progress.start = stages, 0, move.start

    def _load(self, request: Request, layer_idx: int, start: int, end: int) -> None:
        """Rows that enter a layer into the request's buffer: embeddings, or what the cache kept, with gate rows."""
        progress = request.progress
        if layer_idx:
            assert progress.reuse is not None
            progress.reuse.load_hidden(layer_idx, start, end, progress.hidden)
        else:
            ids = torch.tensor(request.prompt[start:end], device=self.device)
            progress.hidden[start:end] = self.model.embedding.index_select(0, ids)
        layer = self.model.layers[layer_idx]
        if layer.gate is not None and _runs_gate(request, layer_idx):
            rows = progress.hidden[start:end].clone()
            z = self.ops.gate_pool(rows, None, layer.input_norm, self.model.eps, layer.gate.w1)[1]
            self._gate_buffer(request, layer_idx)[start:end] = z

    def _gate_buffer(self, request: Request, layer_idx: int) -> Tensor:
        """The request's gate rows of a layer, [prompt, gate_dim] fp32."""
        z = request.progress.z
        if layer_idx not in z:
            size = len(request.prompt), self.model.config.gate_dim
            z[layer_idx] = torch.empty(size, dtype=torch.float32, device=self.device)
        return z[layer_idx]

    def _fill_gate_rows(self, layer_idx: int, request: Request) -> bool:
        """Add the gate rows of the cached prefix to those of the active rows. False where the cache lacks some."""
        progress = request.progress
        if progress.start:
            assert progress.reuse is not None
            cached = progress.reuse.gate_rows(layer_idx, progress.start)
            if cached is None:
                return False
            self._gate_buffer(request, layer_idx)[: progress.start] = cached
        return True

    def _refill(self, layer_idx: int, layer: PackedLayer, step: StepBatch, slices: tuple[PrefillSlice, ...]) -> None:
        """Rows that pass a layer's mixer alone, to rebuild what the cache no longer holds."""
        self._count(layer_idx, slices)
        for s in slices:
            route = s.request.routes[layer_idx]
            hidden = s.request.progress.hidden[s.start : s.end].clone()
            u = self.ops.split_norm(hidden, None, layer.input_norm, self.model.eps, _all_rows(hidden))
            rows = BranchRows.of_slices((s,), self.device)
            if route == ATTENTION:
                assert layer.attention is not None, "a route that the layer does not have"
                batch = step.attention(layer_idx, rows)
                layer.attention.append(u, batch, self.model.cos_sin, self.pool.kv_cache, self.ops)
            else:
                assert layer.ssm is not None, "a route that the layer does not have"
                caches = self.pool.state_cache, self.pool.conv_cache
                layer.ssm.advance(u, step.ssm(layer_idx, rows), *caches, self.ops)

    def _count(self, layer_idx: int, slices: tuple[PrefillSlice, ...]) -> None:
        """Keep account of the rows that pass a layer."""
        for s in slices:
            progress = s.request.progress
            progress.computed += s.end - s.start
            progress.lowest[layer_idx] = min(progress.lowest[layer_idx], s.start)

    def _run_layer(self, layer_idx: int, layer: PackedLayer, step: StepBatch, rows: _Rows) -> None:
        """Shared operators on the packed rows, the branches on compact rows."""
        ops, eps = self.ops, self.model.eps
        self._count(layer_idx, rows.slices)
        split = step.split(layer_idx, rows.slices)
        if rows.u is None:
            u = ops.split_norm(rows.h, rows.delta, layer.input_norm, eps, split.order)
        else:
            u = rows.u if split.one_route else ops.gather_rows(rows.u, split.order)
        self._capture_hidden(layer_idx, rows)
        y_attention, y_ssm = self._run_branches(layer_idx, layer, step, split, u)
        if layer.ffn is None and split.one_route:
            rows.delta = y_attention if split.num_attention else y_ssm
        elif layer.ffn is None:
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

    def _capture_hidden(self, layer_idx: int, rows: _Rows) -> None:
        """Where the cache wants them, copy the rows that enter the layer into its pages."""
        for s, where in rows.ranges():
            reuse = s.request.reuse
            if reuse is None or s.kind is not StageKind.FULL or layer_idx not in reuse.captures.hidden:
                continue
            first, behind, pages = reuse.captures.hidden[layer_idx]
            start, end = max(first, s.start), min(behind, s.end)
            if start < end:
                per_page = self.pool.layout.hidden_tokens
                column, offset = np.divmod(np.arange(start, end), per_page)
                place = torch.from_numpy(pages[column - first // per_page].astype(np.int64)).to(self.device)
                kept = rows.h[where.start + start - s.start : where.start + end - s.start]
                self.pool.hidden_cache[place, torch.from_numpy(offset).to(self.device)] = kept

    def _collect_gate_rows(self, next_idx: int, rows: _Rows, decode_z: list[tuple[int, Tensor]] | None) -> None:
        """Where a request's next layer has a gate to run, keep the rows z that leave for it; those of decodes where
        the context cache is to have them."""
        layer = self.model.layers[next_idx]
        num_decodes = rows.h.shape[0] - sum(s.end - s.start for s in rows.slices)
        if layer.gate is None or not (
            decode_z is not None or any(_runs_gate(s.request, next_idx) for s in rows.slices)
        ):
            return
        rows.u, z = self.ops.gate_pool(rows.h, rows.delta, layer.input_norm, self.model.eps, layer.gate.w1)
        rows.delta = None
        if decode_z is not None:
            decode_z.append((next_idx, z[:num_decodes]))
        for s, where in rows.ranges():
            if _runs_gate(s.request, next_idx):
                self._gate_buffer(s.request, next_idx)[s.start : s.end] = z[where]

    def _keep_decode_gates(self, decodes: list[Request], slots: np.ndarray, decode_z: list[tuple[int, Tensor]]) -> None:
        """The gate rows of this step's decodes into `gate_table`, at the number of their generated token."""
        numbers = [r.replayed for r in decodes]
        self._widen_gate_table(max(numbers))
        assert self.gate_table is not None
        layers = [layer_idx for layer_idx, _ in decode_z]
        stacked = torch.stack([z for _, z in decode_z], dim=1)
        rows, columns, at = (on_device(index, np.int64, self.device) for index in (slots, numbers, layers))
        self.gate_table[rows[:, None], columns[:, None], at[None]] = stacked

    def _widen_gate_table(self, number: int) -> None:
        """Make room for the gate row of a generated token of this number."""
        capacity = 0 if self.gate_table is None else self.gate_table.shape[1]
        if self.gate_table is not None and number >= capacity:
            self.gate_table = F.pad(self.gate_table, (0, 0, 0, 0, 0, max(number + 1, 2 * capacity) - capacity))

    def _unpack(self, rows: _Rows, num_decodes: int) -> Tensor:
        """The prefills' rows back to their requests' buffers. Returns the decodes' rows."""
        if rows.delta is not None:
            rows.h.add_(rows.delta)
        for s, where in rows.ranges():
            s.request.progress.hidden[s.start : s.end] = rows.h[where]
        return rows.h[:num_decodes]


def _passing(slices: Sequence[PrefillSlice]) -> tuple[PrefillSlice, ...]:
    """Those whose rows pass the whole layer."""
    return tuple(s for s in slices if s.kind is not StageKind.REFILL)


def _runs_gate(request: Request, layer_idx: int) -> bool:
    """Whether the request's route at the layer is still to be chosen by the gate."""
    return request.forced[layer_idx] < 0 and len(request.routes) <= layer_idx


def _all_rows(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[0], dtype=torch.int32, device=hidden.device)
