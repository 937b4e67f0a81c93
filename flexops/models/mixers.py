"""The two branches of a layer over packed tokens, as they are trained: whole sequences, no cache.

`packed.py` holds the same branches as the engine runs them, over pages; both call the same operators.
"""

import torch
from torch import Tensor, nn

from .. import kernels as fk
from ..config import FlexHybridConfig


class AttentionMixer(nn.Module):
    """Grouped-query causal attention with rotary embedding (Eq. 1)."""

    def __init__(self, config: FlexHybridConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.softmax_scale
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bias)

    def forward(self, u: Tensor, cu_seqlens: Tensor, positions: Tensor, cos_sin: Tensor | None) -> Tensor:
        """u: [T, hidden_size] packed; positions: int32 [T]; cos_sin as in `kernels.apply_rope`. Returns u's shape."""
        q = self.q_proj(u).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(u).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(u).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if cos_sin is not None:
            q, k = fk.apply_rope(q, cos_sin, positions), fk.apply_rope(k, cos_sin, positions)
        return self.o_proj(fk.varlen_attention(q, k, v, cu_seqlens, self.scale).flatten(1))


class Mamba2Mixer(nn.Module):
    """The Mamba-2 branch: in-projection [z, x, B, C, dt], causal convolution, selective scan (Eq. 2), gated norm."""

    def __init__(self, config: FlexHybridConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.mamba_n_heads, config.mamba_d_head
        self.n_groups, self.d_state = config.mamba_n_groups, config.mamba_d_state
        self.d_inner, self.chunk_size, self.eps = config.d_inner, config.mamba_chunk_size, config.rms_norm_eps
        self.splits = [config.d_inner, config.conv_dim, config.mamba_n_heads]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.splits), bias=config.mamba_proj_bias)
        self.conv1d = nn.Conv1d(
            config.conv_dim, config.conv_dim, config.mamba_d_conv, groups=config.conv_dim, bias=config.mamba_conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = RMSNorm(config.d_inner, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.d_inner, config.hidden_size, bias=config.mamba_proj_bias)

    @property
    def conv_weight(self) -> Tensor:
        """The convolution's weight [conv_dim, d_conv]."""
        return self.conv1d.weight.squeeze(1)

    def forward(self, u: Tensor, cu_seqlens: Tensor) -> Tensor:
        """u: [T, hidden_size] packed sequences, each from an empty state. Returns the same shape."""
        z, xBC, dt = self.in_proj(u).split(self.splits, dim=-1)
        seq_starts = torch.zeros_like(cu_seqlens[1:])
        xBC = fk.causal_conv1d(xBC, self.conv_weight, self.conv1d.bias, cu_seqlens, seq_starts)
        x, B, C = self.split_conv(xBC)
        y = fk.ssd_scan(x, dt, self.A_log, B, C, self.D, self.dt_bias, cu_seqlens, seq_starts, self.chunk_size)
        return self.out_proj(fk.gated_rms_norm(y.flatten(1), z, self.norm.weight, self.eps, self.n_groups))

    def split_conv(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved rows [T, conv_dim] as x [T, H, P], B and C [T, G, N]."""
        state = self.n_groups * self.d_state
        x, B, C = xBC.split([self.d_inner, state, state], dim=-1)
        groups = (self.n_groups, self.d_state)
        return x.unflatten(-1, (self.num_heads, self.head_dim)), B.unflatten(-1, groups), C.unflatten(-1, groups)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, size]. Returns the normalised rows in the dtype of x."""
        return fk.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The feed-forward network down(silu(gate(x)) * up(x))."""

    def __init__(self, config: FlexHybridConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size]. Returns the same shape."""
        return self.down_proj(fk.silu_mul(self.gate_proj(x), self.up_proj(x)))


def rope_table(config: FlexHybridConfig, length: int, device: torch.device | str) -> Tensor | None:
    """cos and sin of every position, fp32 [length, rotary_dim] for `kernels.apply_rope`; None without RoPE."""
    if config.rope_theta is None:
        return None
    exponent = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32) / config.rotary_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), config.rope_theta**-exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
