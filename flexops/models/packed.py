"""The layers as the engine runs them: weights packed for inference, branches over paged caches.

Same operators and same parameters as `mixers.py`; here a batch mixes decode rows (one token of a running request)
with prefill rows (a range of a prompt), decode rows first, and every request continues from its pages.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ..kernels.linear import PackedLinear
from ..kernels.results import room as room_for
from .gate import PrefillGate
from .mixers import AttentionMixer, Mamba2Mixer, SwiGLU, rope_table
from .modeling import FlexHybridLayer, FlexHybridModel


@dataclass(frozen=True)
class AttentionBatch:
    """The compact attention rows of one layer: `num_decodes` rows of a token each, then prefill ranges.

    positions: int32 [T].  slot_mapping: int64 [T].  page_table: int32 [R, pages].  cu_seqlens: int32 [R+1].
    context_lens: int32 [R], tokens in the cache once this batch is appended.  max_prefill: rows of the longest range.
    prefill_cu_seqlens: int32, the prefill ranges among the rows behind the decodes; None where there are none.
    """

    positions: Tensor
    slot_mapping: Tensor
    page_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    num_decodes: int
    max_prefill: int
    prefill_cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class AttentionRoom:
    """Memory for what attention makes between its projections.

    out: [T, num_heads, head_dim] in the model's dtype.  workspace: [n] fp32, None where the operators want none.
    """

    out: Tensor
    workspace: Tensor | None


@dataclass(frozen=True)
class SSMBatch:
    """The compact SSM rows of one layer: `num_decodes` rows of a token each, then prefill ranges.

    positions: int32 [num_decodes].  state_pages, conv_pages: int32 [R, pages], where each request's state and window
    live; `initial_*` hold -1 rows where a prefill range starts from nothing.  cu_seqlens, seq_starts: int32, the
    prefill ranges among the rows behind the decodes.  checkpoint_rows: int32 [S], rows among them after which the state
    and window are also written to checkpoint_pages int32 [S, pages of both]; None for none.
    """

    num_decodes: int
    positions: Tensor
    state_pages: Tensor
    conv_pages: Tensor
    cu_seqlens: Tensor
    seq_starts: Tensor
    initial_state_pages: Tensor
    initial_conv_pages: Tensor
    checkpoint_rows: Tensor | None = None
    checkpoint_pages: Tensor | None = None


@dataclass(frozen=True)
class SSMRoom:
    """Memory for what the SSM branch makes between its projections; the last two are None without prefill rows.

    mixed: [T, d_inner].  update: [num_decodes, d_inner] and fp32 [num_decodes, num_heads], what `state_update` makes.
    convolved: [prefill rows, conv_dim].  scanned: [prefill rows, num_heads, head_dim].
    """

    mixed: Tensor
    update: tuple[Tensor, Tensor]
    convolved: Tensor | None = None
    scanned: Tensor | None = None


class PackedAttention:
    """The attention branch over paged KV."""

    def __init__(self, mixer: AttentionMixer) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        self.scale = mixer.scale
        projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        bias = None if mixer.q_proj.bias is None else torch.cat([p.bias for p in projections])
        self.qkv = PackedLinear([p.weight for p in projections], bias)
        self.out = PackedLinear(mixer.o_proj.weight, mixer.o_proj.bias)

    def __call__(
        self, u: Tensor, batch: AttentionBatch, cos_sin: Tensor | None, kv_cache: Tensor, ops: ModuleType
    ) -> Tensor:
        """u: [T, hidden_size] compact rows -> [T, hidden_size]; this batch's keys and values enter kv_cache."""
        q = self.append(u, batch, cos_sin, kv_cache, ops)
        return self.out(self.attend(q, batch, kv_cache, ops).flatten(1))

    def room(self, q: Tensor, batch: AttentionBatch, kv_cache: Tensor, ops: ModuleType) -> AttentionRoom:
        """New memory for `attend`."""
        n, table = batch.num_decodes, batch.page_table
        numbers = ops.attention_workspace(q[:n], kv_cache, table[:n]) if n else 0
        if batch.prefill_cu_seqlens is not None:
            numbers = max(numbers, ops.attention_workspace(q[n:], kv_cache, table[n:]))
        workspace = torch.empty(numbers, dtype=torch.float32, device=q.device) if numbers else None
        return AttentionRoom(torch.empty(q.shape, dtype=q.dtype, device=q.device), workspace)

    def attend(
        self, q: Tensor, batch: AttentionBatch, kv_cache: Tensor, ops: ModuleType, room: AttentionRoom | None = None
    ) -> Tensor:
        """q: [T, num_heads, head_dim] -> attention over the cache, the same shape, in the room's memory."""
        room = room or self.room(q, batch, kv_cache, ops)
        n = batch.num_decodes
        if n:
            lens = (batch.cu_seqlens[: n + 1], batch.context_lens[:n])
            results = room.out[:n], room.workspace
            ops.paged_attention(q[:n], kv_cache, batch.page_table[:n], *lens, self.scale, 1, *results)
        if batch.prefill_cu_seqlens is not None:
            lens = (batch.prefill_cu_seqlens, batch.context_lens[n:])
            results = room.out[n:], room.workspace
            ops.paged_attention(q[n:], kv_cache, batch.page_table[n:], *lens, self.scale, batch.max_prefill, *results)
        return room.out

    def append(
        self,
        u: Tensor,
        batch: AttentionBatch,
        cos_sin: Tensor | None,
        kv_cache: Tensor,
        ops: ModuleType,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Keys and values of u [T, hidden_size] into kv_cache; returns the rotated queries [T, num_heads, head_dim].

        out: memory for the projection [T, qkv.out_features] and the queries, written; None makes it.
        """
        projected, rotated = out or (None, None)
        heads = self.qkv(u, projected).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return ops.append_kv(q, k, v, cos_sin, batch.positions, kv_cache, batch.slot_mapping, rotated)


class PackedMamba2:
    """The Mamba-2 branch over paged states: one fused step for decode rows, convolution and scan for prefill rows."""

    def __init__(self, mixer: Mamba2Mixer) -> None:
        self.mixer = mixer
        self.in_proj = PackedLinear(mixer.in_proj.weight, mixer.in_proj.bias)
        self.out = PackedLinear(mixer.out_proj.weight, mixer.out_proj.bias)
        self.conv_weight = mixer.conv_weight.detach().contiguous()
        self.conv_bias = None if mixer.conv1d.bias is None else mixer.conv1d.bias.detach()
        self.A_log, self.D, self.dt_bias = (p.detach() for p in (mixer.A_log, mixer.D, mixer.dt_bias))
        self.norm_weight = mixer.norm.weight.detach()

    def __call__(self, u: Tensor, batch: SSMBatch, state_cache: Tensor, conv_cache: Tensor, ops: ModuleType) -> Tensor:
        """u: [T, hidden_size] compact rows -> [T, hidden_size]; states and windows move on by this batch's tokens."""
        return self.out(self.mix(*self.project(u), batch, state_cache, conv_cache, ops))

    def project(self, u: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The in-projection's z [T, d_inner], xBC [T, conv_dim] and dt [T, num_heads], slices of one tensor.

        out: that tensor, [T, in_proj.out_features], written; None makes it.
        """
        z, xBC, dt = self.in_proj(u, out).split(self.mixer.splits, dim=-1)
        return z, xBC, dt

    def room(self, z: Tensor, xBC: Tensor, dt: Tensor, num_decodes: int) -> SSMRoom:
        """New memory for `mix`."""
        n = num_decodes
        y, sums = room_for("state_update", (xBC[:n], z[:n], dt[:n]))
        mixed = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if n == z.shape[0]:
            return SSMRoom(mixed, (y, sums))
        convolved = torch.empty(xBC[n:].shape, dtype=z.dtype, device=z.device)
        return SSMRoom(mixed, (y, sums), convolved, torch.empty_like(mixed[n:]).unflatten(1, (dt.shape[1], -1)))

    def update_arguments(
        self, z: Tensor, xBC: Tensor, dt: Tensor, batch: SSMBatch, state_cache: Tensor, conv_cache: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The arguments of `state_update` for the decode rows, in place."""
        n = batch.num_decodes
        return (
            xBC[:n],
            z[:n],
            dt[:n],
            self.conv_weight,
            self.conv_bias,
            self.A_log,
            self.D,
            self.dt_bias,
            batch.positions,
            conv_cache,
            batch.conv_pages[:n],
            batch.conv_pages[:n],
            state_cache,
            batch.state_pages[:n],
            batch.state_pages[:n],
        )

    def finish_update(self, room: SSMRoom, ops: ModuleType) -> None:
        """What `state_update` made, normalised, to the decode rows of room.mixed."""
        y, sums = room.update
        ops.finish_gated_norm(y, sums, self.norm_weight, self.mixer.eps, self.mixer.n_groups, room.mixed[: len(y)])

    def mix(
        self,
        z: Tensor,
        xBC: Tensor,
        dt: Tensor,
        batch: SSMBatch,
        state_cache: Tensor,
        conv_cache: Tensor,
        ops: ModuleType,
        room: SSMRoom | None = None,
    ) -> Tensor:
        """What lies between the projections: [T, d_inner], in the room's memory; states and windows move on."""
        mixer, n = self.mixer, batch.num_decodes
        room = room or self.room(z, xBC, dt, n)
        if n:
            update = self.update_arguments(z, xBC, dt, batch, state_cache, conv_cache)
            ops.state_update(*update, room.update)
            self.finish_update(room, ops)
        if n < z.shape[0]:
            y = self._scan(xBC[n:], dt[n:], batch, state_cache, conv_cache, ops, room)
            norm = self.norm_weight, mixer.eps, mixer.n_groups
            ops.gated_rms_norm(y.flatten(1), z[n:], *norm, room.mixed[n:])
        return room.mixed

    def advance(self, u: Tensor, batch: SSMBatch, state_cache: Tensor, conv_cache: Tensor, ops: ModuleType) -> None:
        """Move states and windows on by prefill rows u [T, hidden_size], without their outputs."""
        z, xBC, dt = self.project(u)
        self._scan(xBC, dt, batch, state_cache, conv_cache, ops, self.room(z, xBC, dt, 0))

    def _scan(
        self,
        xBC: Tensor,
        dt: Tensor,
        batch: SSMBatch,
        state_cache: Tensor,
        conv_cache: Tensor,
        ops: ModuleType,
        room: SSMRoom,
    ) -> Tensor:
        """Convolution and scan of the prefill rows: [T, num_heads, head_dim]."""
        mixer, n = self.mixer, batch.num_decodes
        num_state = batch.state_pages.shape[1]
        rows, pages = batch.checkpoint_rows, batch.checkpoint_pages
        convolved = ops.causal_conv1d(
            xBC,
            self.conv_weight,
            self.conv_bias,
            batch.cu_seqlens,
            batch.seq_starts,
            conv_cache,
            batch.initial_conv_pages,
            batch.conv_pages[n:],
            rows,
            None if pages is None else pages[:, num_state:],
            room.convolved,
        )
        x, B, C = mixer.split_conv(convolved)
        return ops.ssd_scan(
            x,
            dt,
            self.A_log,
            B,
            C,
            self.D,
            self.dt_bias,
            batch.cu_seqlens,
            batch.seq_starts,
            mixer.chunk_size,
            state_cache,
            batch.initial_state_pages,
            batch.state_pages[n:],
            rows,
            None if pages is None else pages[:, :num_state],
            room.scanned,
        )


class PackedFFN:
    """The feed-forward network with gate and up in one product."""

    def __init__(self, ffn: SwiGLU) -> None:
        self.gate_up = PackedLinear([ffn.gate_proj.weight, ffn.up_proj.weight])
        self.down = PackedLinear(ffn.down_proj.weight)

    def __call__(self, x: Tensor, ops: ModuleType, out: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """x: [T, hidden_size] -> the same shape.

        out: memory for gate and up [T, gate_up.out_features], their product [T, down.in_features] and the result,
        written; None makes it.
        """
        both, product, result = out or (None, None, None)
        gate, up = self.gate_up(x, both).chunk(2, dim=-1)
        return self.down(ops.silu_mul(gate, up, product), result)


class PackedGate:
    """The prefill gate's parameters; `kernels.gate_pool` takes w1, `kernels.gate_route` the others."""

    def __init__(self, gate: PrefillGate) -> None:
        self.w1, self.b1, self.w2, self.b2 = (p.detach() for p in (gate.w1, gate.b1, gate.w2, gate.b2))


class PackedLayer:
    """One layer's packed parts; a part the layer lacks is None."""

    def __init__(self, layer: FlexHybridLayer) -> None:
        self.input_norm = layer.input_norm.weight.detach()
        self.gate = None if layer.gate is None else PackedGate(layer.gate)
        self.attention = None if layer.attention is None else PackedAttention(layer.attention)
        self.ssm = None if layer.ssm is None else PackedMamba2(layer.ssm)
        self.ffn = None if layer.ffn is None else PackedFFN(layer.ffn)
        self.ffn_norm = None if layer.ffn_norm is None else layer.ffn_norm.weight.detach()


class PackedModel:
    """A model's weights ready for the engine. Weights changed afterwards are not seen: pack again."""

    def __init__(self, model: FlexHybridModel, max_model_len: int) -> None:
        self.config = model.config
        self.eps = model.config.rms_norm_eps
        self.embedding = model.embed_tokens.weight.detach()
        self.layers = [PackedLayer(cast(FlexHybridLayer, layer)) for layer in model.layers]
        self.norm = model.norm.weight.detach()
        self.head = PackedLinear(model.lm_head.weight)
        self.cos_sin = rope_table(model.config, max_model_len, self.embedding.device)
