"""A request's life: what was asked (`SamplingParams`), where it stands (`Request`), what it gave (`RequestOutput`)."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
from torch import Tensor

from .prefix_reuse import PrefixReuse

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (ids [1, n], logits [1, vocab]) -> logits [1, vocab]
StopCheck = Callable[[Tensor], bool]  # ids [1, n], prompt included -> stop


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    max_new_tokens: at most this many tokens.  min_new_tokens: stop tokens are impossible before.
    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k (0: off), top_p (1: off), min_p (0: off): truncation, in this order.
    repetition_penalty (1: off): over prompt and output.  presence_penalty (0: off): over the output.
    seed: random numbers depend on (seed, sample, position) alone, so a request gives the same tokens in any batch;
    None draws one from torch's generator when the request is added.
    stop_token_ids: ends the request, the token is kept in the output.
    stop_strings: text that ends the request wherever in a token it ends; needs an engine with a tokenizer.
    n: samples of one prompt; it is computed once and its pages are shared.
    logprobs: report the log-probability of each chosen token and of this many most likely ones; None: none.
    keep_logits, keep_scores: report each step's logits as the model gave them, and after processing.
    logits_processors, stop_checks: your own, called with this request's ids alone, without padding.

    Raises ValueError for values out of range.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    keep_logits: bool = False
    keep_scores: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    stop_checks: tuple[StopCheck, ...] = ()

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {allowed}")

        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        require(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", "from 0 to max_new_tokens")
        require(self.temperature >= 0 and math.isfinite(self.temperature), "temperature", "finite, 0 (greedy) or more")
        require(self.top_k >= 0, "top_k", "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        require(
            self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty),
            "repetition_penalty",
            "finite and above 0 (1 is off)",
        )
        require(math.isfinite(self.presence_penalty), "presence_penalty", "finite (0 is off)")
        require(self.n >= 1, "n", "at least 1")
        require(all(self.stop_strings), "stop_strings", "non-empty texts")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "None or from 0 to 20")

    @cached_property
    def takes_argmax(self) -> bool:
        """Whether tokens are the argmax of the model's logits and nothing is reported beside them."""
        changed = self.temperature or self.repetition_penalty != 1 or self.presence_penalty or self.min_new_tokens
        reported = self.logprobs is not None or self.keep_logits or self.keep_scores
        return not (changed or reported or self.logits_processors)


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # in the queue, holds no memory
    PREFILL = "prefill"  # its prompt passes the layers
    DECODE = "decode"  # gives a token per step
    FINISHED = "finished"


@dataclass(slots=True)
class RequestOutput:
    """What one step gave for one request. Made once per token, so it is not frozen, which takes four times as long.

    sample: which of the request's n samples.  new_token_ids: the tokens of this step.  num_tokens: how many with those
    before.  token_ids: all of them.
    finish_reason: "stop", "length" or "error" (then `error` says what the request's own code raised); None while it
    runs.  layout: the routes of all layers.  gate_margins: |p_attn - p_ssm| per layer, 1.0 where the route was given.
    logprobs: per new token, {token id: log-probability}.  logits, scores: per new token [vocab] fp32, where asked.
    time_to_first_token_us: set with the first token.
    cached_tokens: leading prompt tokens that no layer computed.  reused_layers: layers that started from the cache.
    saved_token_layers: what the cache saved, of prompt_tokens times layers.
    """

    request_id: int
    sample: int
    new_token_ids: list[int]
    num_tokens: int
    _output: list[int] = field(repr=False)  # the request's own list, which only grows
    finish_reason: str | None
    layout: tuple[int, ...]
    gate_margins: tuple[float, ...]
    prompt_tokens: int
    logprobs: list[dict[int, float]] | None = None
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None
    time_to_first_token_us: float | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    reused_layers: int = 0
    saved_token_layers: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, a new list each time."""
        return self._output[: self.num_tokens]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class StageKind(Enum):
    """What the rows of a stage do."""

    FULL = "full"  # pass the layer and go on to the next
    REPLAY = "replay"  # pass a layer once more for what they become above; the layer's KV and state stay
    REFILL = "refill"  # pass the layer's mixer alone, to rebuild its KV or state


@dataclass(frozen=True)
class Stage:
    """The rows [start, end) of a prompt in one layer."""

    kind: StageKind
    layer_idx: int
    start: int
    end: int


@dataclass
class PrefillProgress:
    """How far a prompt has passed the layers.

    stages: what is still to be planned, in order; of the first one the rows before `done` are.  start: the first row
    that passes the layer at hand; those before come from the cache.  hidden: [prompt, hidden_size], the residual
    stream between steps, valid for the rows of the stages.  z: by layer, [prompt, gate_dim] fp32, gate rows, filled as
    rows leave the layer before.  read: pages that a stage's first rows take their SSM state from, by layer and kind;
    otherwise the request's own.  computed: rows that passed a layer so far, each time counted.  lowest: int64
    [num_layers], the first row that passed each layer or its mixer.
    """

    stages: deque[Stage]
    start: int
    hidden: Tensor
    lowest: np.ndarray
    done: int = 0
    z: dict[int, Tensor] = field(default_factory=dict)
    read: dict[tuple[int, StageKind], np.ndarray] = field(default_factory=dict)
    reuse: PrefixReuse | None = None
    computed: int = 0
    reused_layers: int = 0


@dataclass(eq=False)
class Request:
    """A request inside the engine. The engine alone writes to it."""

    request_id: int
    sample: int
    prompt: list[int]
    params: SamplingParams
    forced: list[int]  # a route per layer, -1 where the gate decides
    gate_bias: float
    priority: int
    seed: int
    added_at_us: float
    gate_tokens: int  # leading tokens of the prompt that the gates pool; fewer than all where a continuation is scored
    first_logit_row: int  # prompt rows from here on give logits; the last one alone but where a continuation is scored
    status: Status = Status.WAITING
    routes: list[int] = field(default_factory=list)  # chosen so far, a prefix of the layers
    gate_margins: list[float] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    replayed: int = 0  # output tokens whose rows are in the caches again; lags behind output after a preemption
    prefill: PrefillProgress | None = None
    slot: int = -1  # row of the engine's tables while it holds memory
    layout: tuple[int, ...] = ()  # routes and margins as outputs report them, once the prompt has passed all layers
    margins: tuple[float, ...] = ()
    first_token_at_us: float | None = None
    decode_flops: tuple[float, float] = (0.0, 0.0)  # of a step: a constant, and per token of context
    forks_left: int = 0  # samples that still have to be split off at the end of the prefill
    continuation: list[int] = field(default_factory=list)  # tokens to score, of which the prompt holds all but the last
    scores: list[float] = field(default_factory=list)  # log-probabilities of the continuation so far
    waits_for: "Request | None" = None  # a prefill whose prefix it shares; it waits for one at most
    gate_rows: dict[int, Tensor] = field(default_factory=dict)  # by layer, the prompt's rows, for the context cache
    looked_up_at: int = 0  # clock of the context cache, see `PrefixReuse.clock`
    cached_tokens: int = 0
    reused_layers: int = 0
    saved_token_layers: int = 0

    @property
    def progress(self) -> PrefillProgress:
        """How far the prompt is, while it is prefilled."""
        assert self.prefill is not None, "only a prefill has progress"
        return self.prefill

    @cached_property
    def tokens(self) -> np.ndarray:
        """int32, the prompt."""
        return np.array(self.prompt, dtype=np.int32)

    @property
    def known_routes(self) -> list[int]:
        """A route per layer: chosen already, forced, or -1."""
        return [*self.routes, *self.forced[len(self.routes) :]]

    @property
    def reuse(self) -> PrefixReuse | None:
        """What it takes from the context cache while it is prefilled."""
        return None if self.prefill is None else self.prefill.reuse

    @property
    def rank(self) -> tuple[int, int, int]:
        """Place in the line: by priority, then by arrival, which is the order of ids."""
        return (-self.priority, self.request_id, self.sample)
