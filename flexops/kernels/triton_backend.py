"""The operators as Triton kernels, under one namespace."""

from .activation import silu_mul
from .attention import attention_workspace, paged_attention
from .causal_conv1d import causal_conv1d
from .decode_branches import decode_branches
from .gate_pool import gate_pool, gate_route
from .kv_cache import append_kv, apply_rope
from .norm import finish_gated_norm, gated_rms_norm, rms_norm
from .reference import ATTENTION, GATE_TILE, SSM
from .split_merge import gather_rows, merge_norm, scatter_rows, split_norm
from .ssd_scan import ssd_scan
from .state_update import state_update

__all__ = [
    "ATTENTION",
    "GATE_TILE",
    "SSM",
    "append_kv",
    "apply_rope",
    "attention_workspace",
    "causal_conv1d",
    "decode_branches",
    "finish_gated_norm",
    "gate_pool",
    "gate_route",
    "gated_rms_norm",
    "gather_rows",
    "merge_norm",
    "paged_attention",
    "rms_norm",
    "scatter_rows",
    "silu_mul",
    "split_norm",
    "ssd_scan",
    "state_update",
]
