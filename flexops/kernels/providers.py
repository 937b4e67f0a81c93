"""flash-attn and mamba-ssm in place of our prefill kernels, where they were measured to be faster.

Only for prefill from an empty cache on CUDA: flash-attn 2 wants paged blocks of 256 tokens and mamba_ssm knows no page
tables. Never under `deterministic=True`: neither promises bits that do not depend on what shares the batch. Which one
runs is looked up in a table of times measured on this device, per shape of the call; a shape that was not measured
runs ours. A package that is not installed, or a call it cannot take, is ours too.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

OURS = "flexops"
FLASH_ATTENTION = "flash-attn"
MAMBA_SSM = "mamba-ssm"


@dataclass(frozen=True)
class CallShape:
    """What a provider's speed depends on: `dims` are fixed by the model, the counts by the batch."""

    operator: str
    dtype: torch.dtype
    dims: tuple[int, ...]
    tokens: int
    longest: int

    @property
    def key(self) -> str:
        """The row of the table: counts are rounded up to powers of two."""
        dtype, dims = str(self.dtype).removeprefix("torch."), "x".join(map(str, self.dims))
        tokens, longest = ((max(n, 1) - 1).bit_length() for n in (self.tokens, self.longest))
        return f"{self.operator} {dtype} {dims} tokens<=2^{tokens} longest<=2^{longest}"


@dataclass
class ProviderTable:
    """Times measured on one device.

    device: its name.  times_us: microseconds of each provider, by the key of the call's shape.
    """

    device: str
    times_us: dict[str, dict[str, float]] = field(default_factory=dict)

    def fastest(self, shape: CallShape) -> str:
        """The provider with the least time for this shape; ours where none was measured or ours ties."""
        times = self.times_us.get(shape.key, {})
        return min(times, key=lambda name: (times[name], name != OURS), default=OURS)

    def measure(
        self, shape: CallShape, sides: Mapping[str, Callable[[], object]], time_us: Callable[[Callable], float]
    ) -> None:
        """Time each side of one shape. time_us(f) gives the microseconds of f(), on CUDA waiting for the device."""
        self.times_us[shape.key] = {name: time_us(side) for name, side in sides.items()}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"device": self.device, "times_us": self.times_us}, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: Path, device: str) -> "ProviderTable":
        """The table in a file that `save` wrote; an empty one where the file is missing or of another device."""
        if not path.exists():
            return cls(device)
        stored = json.loads(path.read_text())
        return cls(device, stored["times_us"] if stored["device"] == device else {})


def flash_attention() -> Callable | None:
    """flash-attn's varlen function, or None where the package is not installed or does not load."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


def mamba_scan() -> Callable | None:
    """mamba_ssm's chunked scan, or None where the package is not installed or does not load."""
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    except (ImportError, AttributeError):
        return None


def run_flash_attention(
    function: Callable, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, max_query_len: int
) -> Tensor:
    """Causal self-attention of packed sequences: q [T, Hq, d], k and v [T, Hk, d], rotated -> [T, Hq, d]."""
    lens = (cu_seqlens, cu_seqlens, max_query_len, max_query_len)
    return function(q, k, v, *lens, softmax_scale=scale, causal=True)


def run_mamba_scan(
    function: Callable,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    requests: int,
    chunk_size: int,
    state_cache: Tensor,
    final_pages: Tensor,
) -> Tensor:
    """`ssd_scan` of `requests` equally long sequences from empty states; final states are copied to their pages."""

    def batched(t: Tensor) -> Tensor:
        return t.unflatten(0, (requests, -1))

    y, states = function(
        batched(x),
        batched(dt),
        -torch.exp(A_log.float()),
        batched(B),
        batched(C),
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        dt_softplus=True,
        return_final_states=True,
    )
    heads_per_page = state_cache.shape[1]
    for i in range(final_pages.shape[1]):
        part = states[:, i * heads_per_page : (i + 1) * heads_per_page]
        state_cache[:, : part.shape[1]].index_copy_(0, final_pages[:, i].long(), part.to(state_cache.dtype))
    return y.flatten(0, 1)


class Providers:
    """Chooses per call between a provider and our kernel; a method returns None where ours is to run.

    table: the measured times.  deterministic: True turns every provider off.
    """

    def __init__(self, table: ProviderTable, device: torch.device, deterministic: bool) -> None:
        usable = device.type == "cuda" and not deterministic
        self.table = table
        self.flash_attention = flash_attention() if usable else None
        self.mamba_scan = mamba_scan() if usable else None

    def prefill_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, max_query_len: int
    ) -> Tensor | None:
        """Self-attention of prompts without a cached prefix (Eq. 1).

        q: [T, Hq, d], k, v: [T, Hk, d], rotated.  cu_seqlens: [R+1] int32.  max_query_len: the longest sequence.
        Returns [T, Hq, d], or None: call `paged_attention`.
        """
        if self.flash_attention is None or q.dtype not in (torch.bfloat16, torch.float16):
            return None
        shape = CallShape("prefill_attention", q.dtype, (*q.shape[1:], k.shape[1]), q.shape[0], max_query_len)
        if self.table.fastest(shape) != FLASH_ATTENTION:
            return None
        return run_flash_attention(self.flash_attention, q, k, v, cu_seqlens, scale, max_query_len)

    def prefill_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A_log: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        lengths: list[int],
        chunk_size: int,
        state_cache: Tensor,
        final_pages: Tensor,
    ) -> Tensor | None:
        """`ssd_scan` of prompts without a cached prefix and without checkpoints (Eq. 2).

        Only where all prompts are equally long: mamba_ssm returns final states of ragged batches in the dtype of C,
        and ours are fp32.  lengths: rows of each prompt, on the host.  final_pages: [R, Ns] int32, none -1.
        state_cache is written in place.  Returns y [T, H, P], or None: call `ssd_scan`.
        """
        if self.mamba_scan is None or not lengths or min(lengths) != max(lengths) or not lengths[0]:
            return None
        dims = (*x.shape[1:], *B.shape[1:], chunk_size)
        shape = CallShape("prefill_scan", x.dtype, dims, x.shape[0], lengths[0])
        if self.table.fastest(shape) != MAMBA_SSM:
            return None
        weights = (A_log, B, C, D, dt_bias)
        return run_mamba_scan(
            self.mamba_scan, x, dt, *weights, len(lengths), chunk_size, state_cache, final_pages
        )  # fmt: skip
