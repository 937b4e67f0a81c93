"""The operators of flexops on a CPU: forms of `reference.py` that pass over their data once."""

from flexops.kernels.reference import (
    append_kv,
    apply_rope,
    causal_conv1d,
    finish_gated_norm,
    gate_pool,
    gate_route,
    gated_rms_norm,
    gather_rows,
    merge_norm,
    paged_attention,
    rms_norm,
    scatter_rows,
    silu_mul,
    split_norm,
    ssd_scan,
    state_update,
)

__all__ = [
    "append_kv",
    "apply_rope",
    "causal_conv1d",
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
