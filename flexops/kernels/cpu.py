"""The operators of flexops on a CPU: one pass over memory each, with the same bits whatever shares the call.

Signatures, layouts and meaning are those of `reference.py`, and its contract holds: tensors are contiguous but for
dim 0. A row's (or request's) result does not depend on which other rows are in the call, on their order, on where a
sequence was cut, nor on the number of threads: `cpu_simd.py` says how. fp32 and bf16 activations, with parameters of
either; other dtypes run the reference, which promises less. Kernels are compiled on their first call, once per
machine: `cpu_launch.py`.
"""

import torch
from torch import Tensor

from flexops.kernels.cpu_attention import append_kv, apply_rope, paged_attention
from flexops.kernels.cpu_conv import causal_conv1d
from flexops.kernels.cpu_gate import gate_pool, gate_route
from flexops.kernels.cpu_rows import (
    finish_gated_norm,
    gated_rms_norm,
    gather_rows,
    merge_norm,
    rms_norm,
    scatter_rows,
    silu_mul,
    split_norm,
)
from flexops.kernels.cpu_ssm import ssd_scan, state_update
from flexops.kernels.reference import attention_workspace

__all__ = [
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


def decode_branches(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One branch after the other: on a CPU there is no launch to save."""
    rows, of_attention = torch.arange(q.shape[0] + 1, dtype=torch.int32), None if out is None else out[0]
    attention = paged_attention(q, kv_cache, page_table, rows, context_lens, scale, 1, of_attention)
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions)
    caches = (conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out)
    return attention, *state_update(*ssm, *caches, None if out is None else out[1:])
