"""Settings of the model (`FlexHybridConfig`) and of the runtime (`EngineConfig`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

LAYER_ROUTES = ("adaptive", "attention", "ssm")


class FlexHybridConfig(PretrainedConfig):
    """A stack of layers, each with an attention branch, a Mamba-2 branch, or both and a gate between them.

    `layer_routes` names what each layer has: "adaptive" (both branches and a gate, the default), "attention" or
    "ssm" (one branch, no gate: a static hybrid). `intermediate_size` 0 gives layers without an FFN;
    `layers_without_ffn` names single ones. `attention_cost` and `ssm_cost` are the normalised costs of Eq. 4 and
    `route_cost_weight` its lambda. Spellings follow transformers' configs (Llama, Bamba, Mamba-2).

    Raises ValueError for sizes that do not fit together.
    """

    model_type = "flex_hybrid"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 12,
        layer_routes: list[str] | None = None,
        layers_without_ffn: list[int] | None = None,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        attention_bias: bool = False,
        attention_scale: float | None = None,
        rope_theta: float | None = 10000.0,
        partial_rotary_factor: float = 1.0,
        mamba_n_heads: int | None = None,
        mamba_d_head: int = 64,
        mamba_d_state: int = 64,
        mamba_n_groups: int = 1,
        mamba_d_conv: int = 4,
        mamba_chunk_size: int = 64,
        mamba_conv_bias: bool = True,
        mamba_proj_bias: bool = False,
        gate_dim: int = 16,
        route_cost_weight: float = 0.0,
        attention_cost: float = 1.0,
        ssm_cost: float = 0.25,
        rms_norm_eps: float = 1e-5,
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.layer_routes = list(layer_routes) if layer_routes is not None else ["adaptive"] * num_hidden_layers
        self.layers_without_ffn = list(layers_without_ffn or [])
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.attention_bias = attention_bias
        self.attention_scale = attention_scale
        self.rope_theta = rope_theta
        self.partial_rotary_factor = partial_rotary_factor
        self.mamba_n_heads = mamba_n_heads or max(1, 2 * hidden_size // mamba_d_head)
        self.mamba_d_head = mamba_d_head
        self.mamba_d_state = mamba_d_state
        self.mamba_n_groups = mamba_n_groups
        self.mamba_d_conv = mamba_d_conv
        self.mamba_chunk_size = mamba_chunk_size
        self.mamba_conv_bias = mamba_conv_bias
        self.mamba_proj_bias = mamba_proj_bias
        self.gate_dim = gate_dim
        self.route_cost_weight = route_cost_weight
        self.attention_cost = attention_cost
        self.ssm_cost = ssm_cost
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self._check()
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def _check(self) -> None:
        if len(self.layer_routes) != self.num_hidden_layers or set(self.layer_routes) - set(LAYER_ROUTES):
            raise ValueError(
                f"layer_routes={self.layer_routes!r} must name one of {LAYER_ROUTES} for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers"
            )
        for name, whole, part in (
            ("num_attention_heads / num_key_value_heads", self.num_attention_heads, self.num_key_value_heads),
            ("mamba_n_heads / mamba_n_groups", self.mamba_n_heads, self.mamba_n_groups),
            ("head_dim / 8", self.head_dim, 8),
            ("mamba_d_head / 8", self.mamba_d_head, 8),
        ):
            if part < 1 or whole % part:
                raise ValueError(f"{name} must be a whole number of at least 1, got {whole} / {part}")
        for name, value, low, high in (
            ("head_dim", self.head_dim, 8, 256),
            ("mamba_d_head", self.mamba_d_head, 8, 256),
            ("mamba_d_state", self.mamba_d_state, 16, 256),
            ("mamba_d_conv", self.mamba_d_conv, 2, 4),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is not supported: it must be from {low} to {high}")
        if self.mamba_chunk_size < 16 or self.mamba_chunk_size & (self.mamba_chunk_size - 1):
            raise ValueError(f"mamba_chunk_size={self.mamba_chunk_size} must be a power of two from 16")
        if self.rotary_dim % 2:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor} gives an odd rotary dimension")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns; 0 without RoPE (`rope_theta=None`)."""
        return 0 if self.rope_theta is None else int(self.head_dim * self.partial_rotary_factor)

    @property
    def d_inner(self) -> int:
        """Width of the SSM branch, heads times head dim."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def conv_dim(self) -> int:
        """Channels of the SSM branch's convolution: x, B and C."""
        return self.d_inner + 2 * self.mamba_n_groups * self.mamba_d_state

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores, head_dim ** -0.5 unless `attention_scale` says otherwise."""
        return self.attention_scale if self.attention_scale is not None else self.head_dim**-0.5

    def has_ffn(self, layer_idx: int) -> bool:
        """Whether the layer has a feed-forward network."""
        return self.intermediate_size > 0 and layer_idx not in self.layers_without_ffn


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the runtime.

    memory_bytes: size of the page pool; None takes `memory_fraction` of the device's free memory (on a CPU, of
    the memory that is available when the engine is made).
    max_num_requests: requests that run at once.
    max_batched_tokens: prefill work of one step in token-layers (tokens times layers they pass).
    decode_slowdown: beside decodes a step takes only as much prefill as lets it last so many times what the decodes
    alone take, by the engine's own measurements; None always allows max_batched_tokens. Never changes a result.
    max_model_len: prompt plus output of one request; None takes the model's max_position_embeddings.
    selective_batching: False runs requests grouped by whole layout, one group after another (ablation of §5.1).
    coordination: both branches of a layer at once on a GPU (§5.2). True: partitioned SMs where the predicted gain beats
    fork and join, and one launch for decodes; "streams": two plain streams; False: one after the other (ablation), as
    on every CPU. Never changes a result.
    static_decode: steps of decodes alone make the same launches on the same memory, whatever the layouts and contexts
    of their requests: batches and page tables are filled up to powers of two, and both branches of a layer run over
    all rows. CUDA graphs need that; there are none yet. It costs the projections of both branches for every row, and on
    a CPU the recording of steps, which is faster there. On a CPU it never changes a result.
    profile: a file that `flexops profile` wrote: what the parts of a layer take on this device, for coordination and
    the context cache's choice of what to keep. None takes the one beside the model, or in the user's cache folder;
    without any, costs are estimated. Never changes a result.
    context_cache: "hybrid" reuses prefixes layer by layer (§6), "conventional" only whole ones of an equal layout (for
    comparison), None keeps nothing between requests. Never changes a result.
    cache_entries: "auto" keeps KV, states and layer inputs while there is room and lets their value decide what goes;
    "paper" keeps layer inputs and states and rebuilds KV from the inputs.
    cache_eviction: "value" evicts what saves least per byte (Eq. 5), "lru" the least recently used (for comparison; the
    conventional cache always does).
    cache_bytes: at most so much of the pool for the cache; None: all that running requests leave free.
    reuse_generated: keep what a request has generated too, for the next turn of a conversation. Its rows were computed
    one at a time; where that differs in bits from a prefill (on a GPU), False is the strict form.
    check_integrity: prove the pool whole and poison freed pages after every step (tests).
    """

    memory_bytes: int | None = None
    memory_fraction: float = 0.25
    max_num_requests: int = 256
    max_batched_tokens: int = 32768
    decode_slowdown: float | None = 1.6
    max_model_len: int | None = None
    selective_batching: bool = True
    coordination: bool | str = True
    static_decode: bool = False
    profile: str | Path | None = None
    context_cache: Literal["hybrid", "conventional"] | None = "hybrid"
    cache_entries: Literal["auto", "paper"] = "auto"
    cache_eviction: Literal["value", "lru"] = "value"
    cache_bytes: int | None = None
    reuse_generated: bool = True
    check_integrity: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_requests", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.decode_slowdown is not None and not self.decode_slowdown > 1:
            raise ValueError(f"decode_slowdown={self.decode_slowdown} must be above 1, or None for no limit")
        if self.coordination not in (True, False, "streams"):
            raise ValueError(f"coordination={self.coordination!r} must be True, False or 'streams'")
        if not isinstance(self.static_decode, bool):
            raise ValueError(f"static_decode={self.static_decode!r} must be True or False")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes={self.memory_bytes} must be positive, or None for a share of the memory")
        choices = {
            "context_cache": ("hybrid", "conventional", None),
            "cache_entries": ("auto", "paper"),
            "cache_eviction": ("value", "lru"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: it must be one of {allowed}")
        if self.context_cache == "conventional" and self.cache_entries == "paper":
            raise ValueError("cache_entries='paper' keeps layer inputs, which context_cache='conventional' has none of")
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise ValueError(f"cache_bytes={self.cache_bytes} must be positive; context_cache=None turns the cache off")
        if not 0 < self.memory_fraction <= 0.95:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be above 0 and at most 0.95")
