"""What the engine counts: requests, tokens, latencies, work per token (Eq. 6)."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import FlexHybridConfig
from ..kernels import ATTENTION
from .request import Request


def decode_flops(config: FlexHybridConfig, routes: Sequence[int]) -> tuple[float, float]:
    """FLOPs of one decode step of a request by Eq. 6, two per multiply-add: the chosen branches, FFNs and the head.

    Norms, activations and softmax are not counted. Returns a constant, and what each attended token of context adds.
    """
    hidden, d_inner = config.hidden_size, config.d_inner
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention_linear = hidden * head_dim * (2 * heads + 2 * kv_heads)
    ssm_linear = hidden * (d_inner + config.conv_dim + config.mamba_n_heads) + d_inner * hidden
    # convolution taps, then decay-and-add (2 multiply-adds per state element) and read-out (1)
    ssm_rest = config.conv_dim * config.mamba_d_conv + 3 * d_inner * config.mamba_d_state
    num_attention = sum(route == ATTENTION for route in routes)
    num_ffn = sum(config.has_ffn(layer_idx) for layer_idx in range(len(routes)))
    total = (
        hidden * config.vocab_size + num_attention * attention_linear + num_ffn * 3 * hidden * config.intermediate_size
    )
    total += (len(routes) - num_attention) * (ssm_linear + ssm_rest)
    return 2.0 * total, 4.0 * num_attention * heads * head_dim


@dataclass
class Metrics:
    """Counters since the engine was made. Times in microseconds."""

    steps: int = 0
    requests_added: int = 0
    requests_finished: Counter[str] = field(default_factory=Counter)  # by reason
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_time_us: float = 0.0
    ttft_us: list[float] = field(default_factory=list)
    tpot_us: list[float] = field(default_factory=list)
    decode_flops: float = 0.0
    decode_steps: int = 0
    layouts: Counter[str] = field(default_factory=Counter)

    def record_finished(self, request: Request, reason: str, now_us: float) -> None:
        """Count a request that has left with its latencies: time to first token, then per further token."""
        self.requests_finished[reason] += 1
        if request.first_token_at_us is not None:
            self.ttft_us.append(request.first_token_at_us - request.added_at_us)
            if len(request.output) > 1:
                self.tpot_us.append((now_us - request.first_token_at_us) / (len(request.output) - 1))

    def as_dict(self) -> dict[str, Any]:
        """Counters, and means of the latencies; None where nothing was measured."""
        return {
            "steps": self.steps,
            "requests_added": self.requests_added,
            "requests_finished": dict(self.requests_finished),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "throughput_tokens_per_s": self.generated_tokens / self.step_time_us * 1e6 if self.step_time_us else None,
            "ttft_us_mean": _mean(self.ttft_us),
            "tpot_us_mean": _mean(self.tpot_us),
            "flops_per_token": self.decode_flops / self.decode_steps if self.decode_steps else None,
            "layouts": dict(self.layouts),
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


class EngineCollector:
    """An engine's numbers as prometheus metrics: `registry.register(EngineCollector(engine.stats))`.

    Needs prometheus-client (extra `serve`). Numbers are read when the registry is scraped; those of a context cache
    that is off, and means of nothing, are left out.
    """

    COUNTERS = (
        *("steps", "requests_added", "preemptions", "prompt_tokens", "generated_tokens", "cached_tokens"),
        *("cache_lookups", "cache_hits", "cache_looked_up_token_layers", "cache_saved_token_layers"),
        *("cache_replayed_token_layers", "cache_repeated_token_layers"),
    )
    GAUGES = (
        *("waiting", "running", "pages", "pages_free", "pages_cached", "cache_hit_rate"),
        *("flops_per_token", "ttft_us_mean", "tpot_us_mean"),
    )
    LABELLED = (("requests_finished", "reason"), ("layouts", "layout"), ("cache_evictions", "kind"))

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        """The metric families of one scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = {name: value for name, value in self._stats().items() if value is not None}
        for name in self.COUNTERS:
            if name in stats:
                yield CounterMetricFamily(f"flexops_{name}", name.replace("_", " "), value=stats[name])
        for name in self.GAUGES:
            if name in stats:
                yield GaugeMetricFamily(f"flexops_{name}", name.replace("_", " "), value=stats[name])
        for name, label in self.LABELLED:
            if name in stats:
                family = CounterMetricFamily(f"flexops_{name}", name.replace("_", " "), labels=[label])
                for value, count in stats[name].items():
                    family.add_metric([value], count)
                yield family
