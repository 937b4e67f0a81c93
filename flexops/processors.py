"""transformers' logits processors and stopping criteria as `SamplingParams` of one request.

What `SamplingParams` can express becomes a setting, applied to all rows at once. Everything else (the other built-in
processors, and user-made ones) is called with one row at a time, ids [1, n] without padding; built-in ones that count
tokens or know the batch are adapted to their row first.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as stopping

from .runtime.request import LogitsProcessor, StopCheck

# what these count from includes the padding of the batch
_COUNTED_FROM = {
    hf.MinLengthLogitsProcessor: "min_length",
    hf.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    hf.ForcedEOSTokenLogitsProcessor: "max_length",
    hf.ExponentialDecayLengthPenalty: "regulation_start",
    hf.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
# the sampler's order: settings up to _LAST_PENALTY come before a request's own processors, the others behind
_LAST_PENALTY, _PLACES = 2, 7
_GUIDANCE = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.ClassifierFreeGuidanceLogitsProcessor)


@dataclass(frozen=True)
class BatchContext:
    """What the processors of a batch were built for.

    length: tokens of the padded prompts.  leading_pads: [B].  stop_token_ids: of the stopping criteria.
    sampling: whether tokens are drawn.
    """

    length: int
    leading_pads: Tensor
    stop_token_ids: tuple[int, ...]
    sampling: bool


@dataclass(frozen=True)
class RowContext:
    """One row: which prompt of the caller's it is (before repetition), its ids [1, n], and the pads left out of it."""

    row: int
    prompt_index: int
    ids: Tensor
    pads: int


def split_processors(
    processors: list[Any], batch: BatchContext, read_last: bool = False
) -> tuple[dict[str, Any], list[Any]]:
    """Settings of SamplingParams that do what the first and the last processors do, and the processors between them.

    The sampler applies settings in a fixed order: penalties and minimum length, then the request's own processors,
    then temperature, top-k, top-p, min-p. Processors in another order stay with the own ones, and all of them with
    `read_last`, where the scores are to be read behind the last. Raises ValueError for classifier-free guidance.
    """
    settings: dict[str, Any] = {"temperature": 1.0 if batch.sampling else 0.0}
    own = list(processors)
    for processor in own:
        if isinstance(processor, _GUIDANCE):
            raise ValueError(
                f"{type(processor).__name__} is not supported: it runs a second prompt in step with every row"
            )
    if read_last:
        return settings, own
    stage = -1
    while own and (found := _setting(own[0], batch)) and stage < found[0] <= _LAST_PENALTY:
        stage, (name, value) = found[0], found[1:]
        settings[name] = max(value, settings.get(name, value))
        own.pop(0)
    following = _PLACES
    while own and batch.sampling and (found := _setting(own[-1], batch)) and _LAST_PENALTY < found[0] < following:
        following, settings[found[1]] = found[0], found[2]
        own.pop()
    return settings, own


def _setting(processor: Any, batch: BatchContext) -> tuple[int, str, Any] | None:
    """Place in the sampler's order, name and value of the setting that does what the processor does; None if none."""
    kind = type(processor)
    if kind is hf.RepetitionPenaltyLogitsProcessor:
        ignored = getattr(processor, "prompt_ignore_length", None)
        only_pads = isinstance(ignored, Tensor) and torch.equal(ignored.cpu(), batch.leading_pads.cpu())
        return (0, "repetition_penalty", processor.penalty) if ignored is None or only_pads else None
    if kind in (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
        if set(processor.eos_token_id.tolist()) != set(batch.stop_token_ids):
            return None
        if kind is hf.MinLengthLogitsProcessor:
            return 1, "min_new_tokens", max(0, processor.min_length - batch.length)
        skipped = batch.length - processor.prompt_length_to_skip
        return _LAST_PENALTY, "min_new_tokens", max(0, processor.min_new_tokens - skipped)
    if getattr(processor, "filter_value", -math.inf) != -math.inf or getattr(processor, "min_tokens_to_keep", 1) != 1:
        return None
    if kind is hf.TemperatureLogitsWarper:
        return 3, "temperature", processor.temperature
    if kind is hf.TopKLogitsWarper:
        return 4, "top_k", processor.top_k
    if kind is hf.TopPLogitsWarper and processor.top_p > 0:
        return 5, "top_p", processor.top_p
    if kind is hf.MinPLogitsWarper:
        return 6, "min_p", processor.min_p
    return None


def processor_for_row(processor: Any, row: RowContext) -> LogitsProcessor:
    """The processor as it is to be called with this row alone."""
    kind = type(processor)
    if kind in _COUNTED_FROM:
        name = _COUNTED_FROM[kind]
        return _with(processor, **{name: getattr(processor, name) - row.pads})
    if kind is hf.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if ignored is not None:
            count = int(ignored[row.row]) if isinstance(ignored, Tensor) else ignored
            return _with(processor, prompt_ignore_length=max(0, count - row.pads))
    if kind is hf.EncoderRepetitionPenaltyLogitsProcessor:
        return _with(processor, encoder_input_ids=row.ids)
    if kind is hf.EncoderNoRepeatNGramLogitsProcessor:
        return kind(processor.ngram_size, row.ids)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return kind(lambda _, ids: allowed(row.prompt_index, ids), 1)
    if kind is hf.SynthIDTextWatermarkLogitsProcessor:  # it remembers what it has seen
        return copy.deepcopy(processor)
    return processor


def _with(processor: Any, **attributes: Any) -> Any:
    clone = copy.copy(processor)
    for name, value in attributes.items():
        setattr(clone, name, value)
    return clone


@dataclass
class Stops:
    """Stopping criteria of a batch, row by row.

    With an eos token among them, a row ends for itself and is filled up with pads. Without one there is nothing to
    fill with: as in transformers, rows go on until each has been stopped, and all end there.
    """

    criteria: StoppingCriteriaList
    num_rows: int
    token_ids: tuple[int, ...] = ()
    pads: bool = False
    others: list[Any] = field(default_factory=list)
    stopped_at: dict[int, int] = field(default_factory=dict)  # row -> new tokens, where rows end together

    def __post_init__(self) -> None:
        for criterion in self.criteria:
            if isinstance(criterion, stopping.ConfidenceCriteria):
                raise ValueError("ConfidenceCriteria is not supported: it belongs to assisted decoding")
            if type(criterion) is stopping.EosTokenCriteria:
                self.token_ids += tuple(criterion.eos_token_id.tolist())
            elif type(criterion) is not stopping.MaxLengthCriteria:
                self.others.append(criterion)
            self.pads |= hasattr(criterion, "eos_token_id")

    @property
    def max_length(self) -> int:
        """Tokens of a row at most, with padding and prompt; transformers always sets it."""
        return self.criteria.max_length

    @property
    def read_scores(self) -> bool:
        """Whether a criterion might look at the scores: the built-in ones do not."""
        return any(type(c) not in (stopping.StopStringCriteria, stopping.MaxTimeCriteria) for c in self.others)

    @property
    def length(self) -> int | None:
        """New tokens of every row where rows were stopped together."""
        return max(self.stopped_at.values()) if len(self.stopped_at) == self.num_rows else None

    def checks(self, row: RowContext, scores: list[Tensor] | None) -> tuple[StopCheck, ...]:
        """The stop checks of a row. scores: [1, vocab] per new token, filled as they come, or None."""
        if not self.others:
            return ()

        def check(ids: Tensor) -> bool:
            ids = ids.to(row.ids.device)
            history = None if scores is None else tuple(scores)
            stop = any(bool(torch.as_tensor(criterion(ids, history)).any()) for criterion in self.others)
            if self.pads:
                return stop
            new_tokens = ids.shape[1] - row.ids.shape[1]
            if stop:
                self.stopped_at.setdefault(row.row, new_tokens)
            return self.length is not None and new_tokens >= self.length

        return (check,)


def recorder(scores: list[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that changes nothing and keeps what it sees."""

    def record(ids: Tensor, row: Tensor) -> Tensor:
        scores.append(row.clone())
        return row

    return record
