"""The same work by flash-attn, mamba-ssm and flash-linear-attention, for operators and calls that they can take.

`side(case, package, arguments)` gives a function that runs one call, or None. They run on CUDA only. What an operator
does and a package does not (paged caches, ragged final states) is left out on their side, never on ours.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _attribute(module: str, name: str) -> Any:
    """A package's function, or None where the package is not installed or does not load."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def _contexts(kv_cache: Tensor, page_table: Tensor, context_lens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [context, Hk, d] of each request."""
    found = []
    for pages, context in zip(page_table, context_lens.tolist(), strict=True):
        used = kv_cache[pages[: -(-context // kv_cache.shape[3])]]
        keys, values = used.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        found.append((keys, values))
    return found


def _flash_prefill(function: Callable, arguments: tuple) -> Callable[[], Any]:
    q, kv_cache, page_table, cu_seqlens, context_lens, scale, longest = arguments
    keys, values = (torch.cat(t) for t in zip(*_contexts(kv_cache, page_table, context_lens), strict=True))
    cu_keys = F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    lens = (cu_seqlens, cu_keys, longest, int(context_lens.max()))
    return partial(function, q, keys, values, *lens, softmax_scale=scale, causal=True)


def _flash_decode(function: Callable, arguments: tuple) -> Callable[[], Any]:
    q, kv_cache, page_table, _, context_lens, scale, _ = arguments
    parts = zip(*_contexts(kv_cache, page_table, context_lens), strict=True)
    keys, values = (torch.nn.utils.rnn.pad_sequence(t, batch_first=True) for t in parts)
    return partial(function, q.unsqueeze(1), keys, values, cache_seqlens=context_lens, softmax_scale=scale, causal=True)


def _mamba_scan(function: Callable, arguments: tuple) -> Callable[[], Any]:
    x, dt, a_log, B, C, D, dt_bias, cu_seqlens, _, chunk_size = arguments[:10]
    lengths = cu_seqlens.diff()
    request = torch.repeat_interleave(lengths, output_size=x.shape[0]).int().unsqueeze(0)
    x, dt, B, C = (t.unsqueeze(0) for t in (x, dt, B, C))
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "seq_idx": request}
    states = {"cu_seqlens": cu_seqlens, "return_varlen_states": True}
    return partial(function, x, dt, -torch.exp(a_log), B, C, chunk_size, **options, **states)


def _mamba_step(function: Callable, arguments: tuple) -> Callable[[], Any] | None:
    """Convolution, step and gate in two launches, in place; the third, the grouped norm, is `gated_rms_norm`."""
    update = _attribute("causal_conv1d", "causal_conv1d_update")
    if update is None:
        return None
    xBC, z, dt, weight, bias, a_log, D, dt_bias = arguments[:8]
    requests, heads = dt.shape
    dim, d_state = arguments[12].shape[2:]
    window = xBC.new_zeros(requests, xBC.shape[1], weight.shape[1])
    state = dt.new_zeros(requests, heads, dim, d_state, dtype=torch.float32)
    A = -torch.exp(a_log)[:, None, None].expand(heads, dim, d_state)
    D, dt_bias, dt = (t.unsqueeze(-1).expand(*t.shape, dim) for t in (D, dt_bias, dt))

    def run() -> Tensor:
        conv = update(xBC, window, weight, bias, "silu")
        x, B, C = conv.split([heads * dim, *[(conv.shape[1] - heads * dim) // 2] * 2], dim=1)
        x, gate = x.unflatten(1, (heads, dim)), z.unflatten(1, (heads, dim))
        B, C = (t.unflatten(1, (-1, d_state)) for t in (B, C))
        return function(state, x, dt, A, B, C, D, z=gate, dt_bias=dt_bias, dt_softplus=True)

    return run


def _mamba_norm(function: Callable, arguments: tuple) -> Callable[[], Any]:
    x, gate, weight, eps, n_groups = arguments
    size = x.shape[1] // n_groups
    return partial(function, x, weight, None, z=gate, eps=eps, group_size=size, norm_before_gate=False)


def _fla_norm(module: Callable, arguments: tuple) -> Callable[[], Any]:
    x, weight, eps = arguments
    norm = module(x.shape[-1], eps=eps).to(x.device, x.dtype)
    norm.weight.data.copy_(weight)
    return partial(norm, x)


def _fla_swiglu(function: Callable, arguments: tuple) -> Callable[[], Any]:
    return partial(function, *arguments)


_Builder = Callable[[Callable, tuple], Callable[[], Any] | None]
SIDES: dict[tuple[str, str], tuple[str, str, _Builder]] = {
    ("paged_attention", "flash-attn"): ("flash_attn", "flash_attn_varlen_func", _flash_prefill),
    ("paged_attention_decode", "flash-attn"): ("flash_attn", "flash_attn_with_kvcache", _flash_decode),
    ("ssd_scan", "mamba-ssm"): ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _mamba_scan),
    ("state_update", "mamba-ssm"): (
        "mamba_ssm.ops.triton.selective_state_update",
        "selective_state_update",
        _mamba_step,
    ),
    ("gated_rms_norm", "mamba-ssm"): ("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn", _mamba_norm),
    ("rms_norm", "fla"): ("fla.modules", "RMSNorm", _fla_norm),
    ("silu_mul", "fla"): ("fla.modules.activations", "swiglu", _fla_swiglu),
}


def side(case: str, package: str, arguments: tuple) -> Callable[[], Any] | None:
    """A function that runs the case in the package once, or None where the package is not there."""
    module, name, build = SIDES[case, package]
    function = _attribute(module, name)
    return None if function is None else build(function, arguments)
