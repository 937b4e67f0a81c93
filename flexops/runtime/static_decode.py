"""Steps of decodes alone whose launches never change: what a CUDA graph would have to hold still (§5.2).

A batch is filled up to a power of two of rows, a page table to a power of two of columns, and each such bucket has its
tensors for good. Where a row goes stands in device tensors alone: both branches of a layer run over all rows, and a row
whose request takes the other route has a page table of -1, no context and state pages of -1 there, so that its branch
reads and writes no cache and gives zeros; the merge takes the row of the branch that it took. Rows of no request are -1
everywhere. So within a bucket every step makes the same launches with the same grids, numbers and addresses, whatever
the layouts of its requests and however long their contexts; it makes no tensor, sends the host's numbers in one copy
and waits for nothing.

What is left out, because only a GPU could tell whether it pays: the graphs themselves, and projections over the rows of
a route. Without the latter the projections of both branches read their weights and compute all rows, where the ordinary
path computes the rows of each route.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..kernels import ATTENTION, SSM
from ..kernels.results import room
from ..models.packed import AttentionBatch, AttentionRoom, PackedLayer, PackedModel, SSMBatch, SSMRoom
from .branches import decode_both
from .memory import PagePool
from .tables import RequestTables

_ALIGNMENT = 64  # bytes


class IndexBuffer:
    """The index tensors of a step in one block of memory: filled on the host, sent to the device in one copy.

    arrays: by name, on the host, page-locked for a GPU.  tensors: by name, on the device. On a CPU they are one memory.
    """

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], type]], device: torch.device) -> None:
        """fields: shape and dtype by name."""
        ends = np.cumsum([0, *(-(-_bytes(*field) // _ALIGNMENT) * _ALIGNMENT for field in fields.values())]).tolist()
        on_gpu = device.type == "cuda"
        self._host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.empty(ends[-1], dtype=torch.uint8, device=device) if on_gpu else self._host
        self._copied = torch.cuda.Event() if on_gpu else None
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, (shape, dtype)), start in zip(fields.items(), ends[:-1], strict=True):
            place = slice(start, start + _bytes(shape, dtype))
            self.arrays[name] = self._host.numpy()[place].view(dtype).reshape(shape)
            self.tensors[name] = self._device[place].view(torch.from_numpy(self.arrays[name]).dtype).view(shape)

    def clear(self) -> None:
        """-1 everywhere on the host, once the last copy has left it."""
        if self._copied is not None:
            self._copied.synchronize()  # it is long done where the step before gave tokens
        self._host.numpy().fill(255)

    def send(self) -> None:
        """Queue the copy to the device."""
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()


def _bytes(shape: tuple[int, ...], dtype: type) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Buffers:
    """What passes between the operators of a step of `size` rows; the layers use it one after the other.

    h: [B, hidden_size], the residual stream.  u: the normalised rows.  y: [2 B, hidden_size], the outputs of attention,
    then of the SSM.  delta: what the FFN adds, or the branches where there is none.  heads, q: attention's projection
    and rotated queries.  attended: its rows before the output projection.  projected, ssm: the SSM's in-projection and
    what its branch makes.  gate_up, product: inside the FFN.  z: fp32 [gates, B, gate_dim], rows for the context cache.
    logits: [B, vocab].  rows, bounds: int32, 0 .. B-1 and 0 .. B.
    """

    h: Tensor
    u: Tensor
    y: Tensor
    delta: Tensor
    heads: Tensor
    q: Tensor
    attended: Tensor
    projected: Tensor
    ssm: SSMRoom
    gate_up: Tensor
    product: Tensor
    z: Tensor
    logits: Tensor
    rows: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, model: PackedModel, size: int, gates: int) -> "Buffers":
        """New ones; what the model's layers lack has no columns."""
        config, like = model.config, model.embedding
        attention = next((layer.attention for layer in model.layers if layer.attention is not None), None)
        ssm = next((layer.ssm for layer in model.layers if layer.ssm is not None), None)
        ffn = next((layer.ffn for layer in model.layers if layer.ffn is not None), None)
        queries = (size, attention.num_heads, attention.head_dim) if attention is not None else (size, 0, 0)
        projected = like.new_empty(size, ssm.in_proj.out_features if ssm is not None else 0)
        nothing = projected[:, :0]
        z, xBC, dt = projected.split(ssm.mixer.splits, dim=-1) if ssm is not None else (nothing,) * 3
        y, sums = room("state_update", (xBC, z, dt))
        bounds = torch.arange(size + 1, dtype=torch.int32, device=like.device)
        return cls(
            h=like.new_empty(size, config.hidden_size),
            u=like.new_empty(size, config.hidden_size),
            y=like.new_empty(2 * size, config.hidden_size),
            delta=like.new_empty(size, config.hidden_size),
            heads=like.new_empty(size, attention.qkv.out_features if attention is not None else 0),
            q=like.new_empty(queries),
            attended=like.new_empty(queries),
            projected=projected,
            ssm=SSMRoom(like.new_empty(z.shape), (y, sums)),
            gate_up=like.new_empty(size, ffn.gate_up.out_features if ffn is not None else 0),
            product=like.new_empty(size, ffn.down.in_features if ffn is not None else 0),
            z=like.new_empty(gates, size, config.gate_dim, dtype=torch.float32),
            logits=like.new_empty(size, model.head.out_features),
            rows=bounds[:-1],
            bounds=bounds,
        )


class StaticDecode:
    """One bucket: steps of up to `size` decodes whose page tables have `columns` columns."""

    def __init__(
        self,
        model: PackedModel,
        pool: PagePool,
        buffers: Buffers,
        columns: int,
        gates: list[int],
        fused: bool,
        ops: ModuleType,
    ) -> None:
        """gates: layers whose gate rows are kept.  fused: the branches of a layer that has both take one launch.

        ops: the operators, which say what attention works in.
        """
        self.model, self.pool, self.buffers, self.columns, self.fused = model, pool, buffers, columns, fused
        self.gates = {layer_idx: place for place, layer_idx in enumerate(gates)}
        self.size = size = buffers.h.shape[0]
        layers = model.layers
        self._attention_layers = np.flatnonzero([layer.attention is not None for layer in layers])
        self._ssm_layers = np.flatnonzero([layer.ssm is not None for layer in layers])
        with_kv, with_states, layout = len(self._attention_layers), len(self._ssm_layers), pool.layout
        self.index = IndexBuffer(
            {
                "slot_mapping": ((with_kv, size), np.int64),
                "ids": ((size,), np.int32),
                "positions": ((size,), np.int32),
                "context_lens": ((with_kv, size), np.int32),
                "page_table": ((with_kv, size, columns), np.int32),
                "state_pages": ((with_states, size, layout.state_pages), np.int32),
                "conv_pages": ((with_states, size, layout.conv_pages), np.int32),
                "inverse": ((len(layers), size), np.int32),
                "gate_rows": ((len(gates) * size,), np.int32),
            },
            model.embedding.device,
        )
        self._attention_batches = {int(i): self._attention_batch(n) for n, i in enumerate(self._attention_layers)}
        self._ssm_batches = {int(i): self._ssm_batch(n) for n, i in enumerate(self._ssm_layers)}
        workspace: Tensor | None = None
        if with_kv:
            numbers = ops.attention_workspace(buffers.q, pool.kv_cache, self.index.tensors["page_table"][0])
            workspace = buffers.h.new_empty(numbers, dtype=torch.float32) if numbers else None
        self._room = AttentionRoom(buffers.attended, workspace)

    def _attention_batch(self, place: int) -> AttentionBatch:
        t = self.index.tensors
        return AttentionBatch(
            positions=t["positions"],
            slot_mapping=t["slot_mapping"][place],
            page_table=t["page_table"][place],
            cu_seqlens=self.buffers.bounds,
            context_lens=t["context_lens"][place],
            num_decodes=self.size,
            max_prefill=0,
        )

    def _ssm_batch(self, place: int) -> SSMBatch:
        t = self.index.tensors
        states, windows = t["state_pages"][place], t["conv_pages"][place]
        return SSMBatch(
            num_decodes=self.size,
            positions=t["positions"],
            state_pages=states,
            conv_pages=windows,
            cu_seqlens=self.buffers.bounds[:1],
            seq_starts=t["positions"][:0],
            initial_state_pages=states[:0],
            initial_conv_pages=windows[:0],
        )

    def fill(
        self, tables: RequestTables, slots: np.ndarray, token_ids: list[int], numbers: list[int], gate_tokens: int
    ) -> None:
        """Write the index tensors and send them: int64 [n] slots, n <= size, and the token that each appends.

        numbers: where in a slot of the gate table, of `gate_tokens` rows, each gate row goes; -1: nowhere.
        """
        self.index.clear()
        a, n, page_tokens = self.index.arrays, len(slots), self.pool.layout.page_tokens
        routes, context = tables.routes[:, slots], tables.context[slots]
        assert (routes >= 0).all(), "a decode has a route in every layer"
        for name, live in (("ids", token_ids), ("positions", context)):
            a[name][n:] = 0
            a[name][:n] = live
        attends = routes[self._attention_layers] == ATTENTION
        a["context_lens"].fill(0)
        a["context_lens"][:, :n] = np.where(attends, context + 1, 0)
        pages = tables.kv_pages[self._attention_layers[:, None], slots, : self.columns]
        a["page_table"][:, :n, : pages.shape[2]] = np.where(attends[:, :, None], pages, -1)
        column, offset = np.divmod(context, page_tokens)
        last = a["page_table"][:, np.arange(n), np.where(attends.any(0), column, 0)].astype(np.int64)
        a["slot_mapping"][:, :n] = np.where(attends, last * page_tokens + offset, -1)
        scans = (routes[self._ssm_layers] == SSM)[:, :, None]
        for name, entries in (("state_pages", tables.state_pages), ("conv_pages", tables.conv_pages)):
            a[name][:, :n] = np.where(scans, entries[self._ssm_layers[:, None], slots], -1)
        a["inverse"][:, :n] = np.where(routes == ATTENTION, 0, self.size) + np.arange(n)
        if self.gates:
            assert tables.routes.size * gate_tokens < 2**31, "more rows of gates than any memory holds"
            token = np.where(np.array(numbers) < 0, -1, slots * gate_tokens + numbers)
            rows = token * tables.num_layers + np.array(list(self.gates))[:, None]
            a["gate_rows"].reshape(-1, self.size)[:, :n] = np.where(token < 0, -1, rows)
        self.index.send()

    def run(self, ops: ModuleType, gate_table: Tensor | None) -> Tensor:
        """The step that was filled in, nothing but launches: logits [size, vocab], which the next step overwrites.

        gate_table: fp32 [slots, tokens, num_layers, gate_dim], written where gate rows are kept.
        """
        model, b, t = self.model, self.buffers, self.index.tensors
        ops.gather_rows(model.embedding, t["ids"], b.h)
        delta: Tensor | None = None
        for layer_idx, layer in enumerate(model.layers):
            if layer_idx in self.gates:
                assert layer.gate is not None, "gate rows come from a gate"
                results = b.u, b.z[self.gates[layer_idx]]
                ops.gate_pool(b.h, delta, layer.input_norm, model.eps, layer.gate.w1, results)
            else:
                ops.split_norm(b.h, delta, layer.input_norm, model.eps, b.rows, b.u)
            self._run_branches(layer_idx, layer, ops)
            delta, inverse = b.delta, t["inverse"][layer_idx]
            if layer.ffn is None:
                ops.gather_rows(b.y, inverse, delta)
            else:
                ops.merge_norm(b.h, b.y[: self.size], b.y[self.size :], inverse, layer.ffn_norm, model.eps, b.u)
                layer.ffn(b.u, ops, (b.gate_up, b.product, delta))
        if gate_table is not None:
            ops.scatter_rows(gate_table.view(-1, gate_table.shape[-1]), b.z.flatten(0, 1), t["gate_rows"])
        ops.split_norm(b.h, delta, model.norm, model.eps, b.rows, b.u)
        return model.head(b.u, b.logits)

    def _run_branches(self, layer_idx: int, layer: PackedLayer, ops: ModuleType) -> None:
        """Both branches that the layer has over all rows, from u to their halves of y."""
        b, pool, attention, ssm = self.buffers, self.pool, layer.attention, layer.ssm
        together = self.fused and attention is not None and ssm is not None
        if attention is not None:
            kv_rows = self._attention_batches[layer_idx]
            q = attention.append(b.u, kv_rows, self.model.cos_sin, pool.kv_cache, ops, (b.heads, b.q))
            if not together:
                attention.attend(q, kv_rows, pool.kv_cache, ops, self._room)
        if ssm is not None:
            states, projected = self._ssm_batches[layer_idx], ssm.project(b.u, b.projected)
            if not together:
                ssm.mix(*projected, states, pool.state_cache, pool.conv_cache, ops, b.ssm)
        if attention is not None and ssm is not None and together:
            decode_both(attention, ssm, q, projected, kv_rows, states, pool, ops, self._room, b.ssm)
        if attention is not None:
            attention.out(b.attended.flatten(1), b.y[: self.size])
        if ssm is not None:
            ssm.out(b.ssm.mixed, b.y[self.size :])


class StaticDecoder:
    """Runs steps of decodes in the bucket that they need; each is made when first needed, and kept.

    Buckets of as many rows share what passes between the operators. As sizes are powers of two, that takes at most
    twice the memory of the largest, and index tensors and the workspace of attention at most four times.
    """

    def __init__(
        self, model: PackedModel, pool: PagePool, tables: RequestTables, keeps_gates: bool, fused: bool
    ) -> None:
        """keeps_gates: gate rows are written for the context cache.  fused: as in `StaticDecode`."""
        self.model, self.pool, self.tables, self.fused = model, pool, tables, fused
        self._gates = [i for i, layer in enumerate(model.layers) if keeps_gates and layer.gate is not None]
        self._buffers: dict[int, Buffers] = {}
        self.buckets: dict[tuple[int, int], StaticDecode] = {}

    def run(
        self,
        slots: np.ndarray,
        token_ids: list[int],
        numbers: list[int],
        gate_table: Tensor | None,
        ops: ModuleType,
    ) -> Tensor:
        """Append a token to each slot, int64 [n]: logits [n, vocab], which the next step overwrites.

        numbers, gate_table: as in `StaticDecode.fill` and `run`.
        """
        bucket = self._bucket(slots, ops)
        bucket.fill(self.tables, slots, token_ids, numbers, 0 if gate_table is None else gate_table.shape[1])
        return bucket.run(ops, gate_table)[: len(slots)]

    def _bucket(self, slots: np.ndarray, ops: ModuleType) -> StaticDecode:
        attends = (self.tables.routes[:, slots] == ATTENTION).any(0)
        longest = int(self.tables.context[slots][attends].max(initial=0)) + 1
        size, columns = _power_of_two(len(slots)), _power_of_two(-(-longest // self.pool.layout.page_tokens))
        if (size, columns) not in self.buckets:
            with torch.inference_mode(False):  # later steps may run inside of it or not
                if size not in self._buffers:
                    self._buffers[size] = Buffers.of(self.model, size, len(self._gates))
                parts = self.model, self.pool, self._buffers[size], columns, self._gates, self.fused, ops
                self.buckets[size, columns] = StaticDecode(*parts)
        return self.buckets[size, columns]


def _power_of_two(n: int) -> int:
    """The smallest power of two from n up."""
    return 1 << (n - 1).bit_length()
