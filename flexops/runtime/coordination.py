"""What a branch costs: the analytic cost model of Table 1, which decides between branches and between caches (§5.2)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import FlexHybridConfig
from ..kernels import ATTENTION


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does per microsecond: multiply-adds counted as two FLOPs, and bytes moved."""

    flops_per_us: float
    bytes_per_us: float

    @classmethod
    def nominal(cls) -> "DeviceSpeed":
        """Ten FLOPs a byte: good enough where costs are only compared with each other."""
        return cls(flops_per_us=1e5, bytes_per_us=1e4)

    @classmethod
    def measure(cls, device: torch.device | str, dtype: torch.dtype) -> "DeviceSpeed":
        """A matrix product and a copy on the device, best of a few: a tenth of a second on a CPU."""
        a = torch.randn(512, 512, device=device, dtype=dtype)
        source = torch.zeros(1 << 24, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        product_us = _best_us(lambda: a @ a, a.device)
        copy_us = _best_us(lambda: target.copy_(source), a.device)
        return cls(flops_per_us=2 * 512**3 / product_us, bytes_per_us=2 * source.numel() / copy_us)


@dataclass(frozen=True)
class CostModel:
    """Predicts the time of one layer's branch from Table 1 and the speed of a device.

    A branch takes the longer of its arithmetic and its memory traffic: its weights once, and per token the KV it
    reads (attention) or per request the state it reads and writes (SSM).
    """

    config: FlexHybridConfig
    dtype: torch.dtype
    speed: DeviceSpeed

    def predict_us(self, route: int, tokens: int, context: int) -> float:
        """Microseconds of one layer's branch for `tokens` new tokens of a request behind `context` cached ones.

        Prefill is tokens > 1 (context 0 without a cached prefix), a decode is tokens = 1. Raises ValueError for
        negative numbers.
        """
        if tokens < 0 or context < 0:
            raise ValueError(f"tokens={tokens} and context={context} must not be negative")
        if not tokens:
            return 0.0
        work = self._attention(tokens, context) if route == ATTENTION else self._ssm(tokens)
        flops, moved_bytes = work
        return max(flops / self.speed.flops_per_us, moved_bytes / self.speed.bytes_per_us)

    def rest_us(self, layer_idx: int, tokens: int) -> float:
        """Microseconds of what a layer does besides its branch: the feed-forward network, where it has one."""
        if not self.config.has_ffn(layer_idx):
            return 0.0
        weights = 3 * self.config.hidden_size * self.config.intermediate_size
        moved_bytes = (weights + 2 * tokens * self.config.hidden_size) * self.dtype.itemsize
        return max(2 * weights * tokens / self.speed.flops_per_us, moved_bytes / self.speed.bytes_per_us)

    def _attention(self, tokens: int, context: int) -> tuple[float, float]:
        """O(L d^2 + L^2 d) in prefill, O(d^2 + r d) in decode."""
        config, size = self.config, self.dtype.itemsize
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        weights = config.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
        pairs = tokens * context + tokens * (tokens + 1) / 2  # of a query and a key it sees
        flops = 2 * weights * tokens + 4 * heads * head_dim * pairs
        kv_bytes = 2 * kv_heads * head_dim * size * (context + tokens)
        return flops, weights * size + kv_bytes + 2 * tokens * config.hidden_size * size

    def _ssm(self, tokens: int) -> tuple[float, float]:
        """O(L d^2 + L d_s) in prefill, O(d^2 + d_s) in decode."""
        config, size = self.config, self.dtype.itemsize
        weights = config.hidden_size * (2 * config.d_inner + config.conv_dim + config.mamba_n_heads)
        state = config.d_inner * config.mamba_d_state
        per_token = 2 * weights + 2 * config.conv_dim * config.mamba_d_conv + 6 * state
        window_bytes = config.conv_dim * config.mamba_d_conv * size
        moved_bytes = weights * size + 2 * (4 * state + window_bytes) + 2 * tokens * config.hidden_size * size
        return per_token * tokens, moved_bytes


def _best_us(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The shortest of a few runs in microseconds, the device waited for."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begin) * 1e6)
    return best
