"""The operators of flexops on a CPU: one pass over memory each, with the same bits whatever shares the call.

Signatures, layouts and meaning are those of `reference.py`, and its contract holds: tensors are contiguous but for
dim 0. A row's (or request's) result does not depend on which other rows are in the call, on their order, on where a
sequence was cut, nor on the number of threads: `cpu_simd.py` says how. fp32 and bf16 activations, with parameters of
either; other dtypes run the reference, which promises less. Kernels are compiled on their first call, once per
machine: `cpu_launch.py`.
"""

from flexops.kernels.cpu_attention import append_kv, apply_rope, paged_attention
from flexops.kernels.cpu_conv import causal_conv1d
from flexops.kernels.cpu_rows import (
    finish_gated_norm,
    gate_pool,
    gate_route,
    gated_rms_norm,
    gather_rows,
    merge_norm,
    rms_norm,
    scatter_rows,
    silu_mul,
    split_norm,
)
from flexops.kernels.cpu_ssm import ssd_scan, state_update

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
