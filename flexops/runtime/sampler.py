"""From logits to tokens, every request with its own settings, all rows at once.

The order is transformers': repetition penalty, presence penalty, no stop token before `min_new_tokens`, the request's
own processors; then for sampled requests temperature, top-k, top-p, min-p.

A row's token is a function of its own logits and settings, bit for bit, whatever rows share the call. Elementwise
operations, `amax`, `softmax` and sorts of a row see that row alone and always at one of two fixed widths; sums, whose
result would depend on how they are split, are taken over integers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kernels import cpu_argmax
from .random import uniform
from .request import Request, SamplingParams

# top-k sets and nearly every nucleus fit in this many tokens, so that the vocabulary need not be sorted
_NARROW = 1024
# fp32 probabilities become integers in units of 2**-44, whose sums are exact in any order and in float64
_WEIGHT_SCALE = 2.0**44
_CPU_CHUNK = 2**18  # scores sampled at a time
_MAX_LOGPROBS = 20


@dataclass
class SampledTokens:
    """What one call chose. Rows in the order of the call; dicts hold the rows that asked for it.

    token_ids: -1 where a row failed.  logprobs: {token id: log-probability} of the model's own distribution, the
    chosen token first.  logits, scores: [vocab] fp32, as the model gave them and after processing.
    errors: what a request's own processor raised, or a ValueError where nothing was left to sample from.
    """

    token_ids: list[int]
    logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def logprobs_of(self, row: int) -> list[dict[int, float]] | None:
        """The row's log-probabilities as a list of one token, None if not asked for."""
        return [self.logprobs[row]] if row in self.logprobs else None

    def logits_of(self, row: int) -> list[Tensor] | None:
        """The row's logits as a list of one token, None if not asked for."""
        return [self.logits[row]] if row in self.logits else None

    def scores_of(self, row: int) -> list[Tensor] | None:
        """The row's scores as a list of one token, None if not asked for."""
        return [self.scores[row]] if row in self.scores else None


class _TokensSeen:
    """The different tokens of a request's text, kept up to date by adding what is new.

    text, output: int64 [k], tokens of prompt and output, and of the output alone.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        self.text = torch.tensor(list(dict.fromkeys(request.prompt)), device=device)
        self.output = self.text[:0]
        self._in_text, self._in_output = set(request.prompt), set[int]()
        self._counted = 0

    def update(self, request: Request) -> None:
        """Take in the tokens that the request has gained."""
        new = dict.fromkeys(request.output[self._counted :])
        self._counted = len(request.output)
        self.text = _extended(self.text, self._in_text, new)
        self.output = _extended(self.output, self._in_output, new)


def _extended(tokens: Tensor, known: set[int], new: Iterable[int]) -> Tensor:
    fresh = [token for token in new if token not in known]
    known.update(fresh)
    return torch.cat([tokens, tokens.new_tensor(fresh)]) if fresh else tokens


class Sampler:
    """Chooses the next token of each request."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._seen: WeakKeyDictionary[Request, _TokensSeen] = WeakKeyDictionary()

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> SampledTokens:
        """The next token of every request.

        logits: [n, vocab] in the model's dtype, not changed.  requests: n, the next position of each is the length
        of its output so far.
        """
        assert logits.shape == (len(requests), self.vocab_size)
        if all(request.params.takes_argmax for request in requests):
            return SampledTokens(_argmax(logits))
        result = SampledTokens([-1] * len(requests))
        scores = logits.to(torch.float32, copy=True)
        self._apply_penalties(scores, requests)
        _forbid_early_stops(scores, requests, self.vocab_size)
        _run_processors(scores, requests, result.errors)
        greedy: list[int] = []
        sampled: list[int] = []
        for i, request in enumerate(requests):
            if i not in result.errors:
                (sampled if request.params.temperature > 0 else greedy).append(i)
        if greedy:
            for i, token in zip(greedy, _argmax(_take(scores, greedy)), strict=True):
                result.token_ids[i] = token
        # on a CPU a few rows at a time, whose intermediates stay in the cache
        step = max(1, _CPU_CHUNK // self.vocab_size) if scores.device.type == "cpu" else len(requests)
        for start in range(0, len(sampled), step):
            rows = sampled[start : start + step]
            self._sample_rows(rows, scores, requests, result)
        _report(result, logits, scores, requests)
        return result

    def _sample_rows(self, rows: list[int], scores: Tensor, requests: Sequence[Request], result: SampledTokens) -> None:
        """Draw for these rows of scores [n, vocab]; a row whose scores are to be reported is overwritten with them."""
        drawn_from = _take(scores, rows)
        tokens, failed = _draw(drawn_from, [requests[i] for i in rows])
        for place, (i, token) in enumerate(zip(rows, tokens, strict=True)):
            if failed[place]:
                result.errors[i] = ValueError(
                    "no token can be sampled: the scores hold NaN or infinity, or every token was ruled out; check the "
                    "request's logits_processors and temperature"
                )
                continue
            result.token_ids[i] = token
            if requests[i].params.keep_scores:
                scores[i] = drawn_from[place]

    def _apply_penalties(self, scores: Tensor, requests: Sequence[Request]) -> None:
        """Repetition and presence penalties of scores [n, vocab], in place."""
        repetition: list[tuple[int, Tensor, float]] = []
        presence: list[tuple[int, Tensor, float]] = []
        for i, request in enumerate(requests):
            params = request.params
            if params.repetition_penalty == 1 and not params.presence_penalty:
                continue
            if request not in self._seen:
                self._seen[request] = _TokensSeen(request, self.device)
            seen = self._seen[request]
            seen.update(request)
            if params.repetition_penalty != 1:
                repetition.append((i, seen.text, params.repetition_penalty))
            if params.presence_penalty:
                presence.append((i, seen.output, params.presence_penalty))
        if repetition:
            cells, penalty = _cells(repetition, scores)
            old = scores[cells]
            scores[cells] = torch.where(old < 0, old * penalty, old / penalty)
        if presence:
            cells, penalty = _cells(presence, scores)
            scores[cells] -= penalty


def _cells(parts: list[tuple[int, Tensor, float]], scores: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(row, token ids, value) of several rows as one index into scores and a value per cell."""
    counts = torch.tensor([len(ids) for _, ids, _ in parts], device=scores.device)
    rows = torch.tensor([row for row, _, _ in parts], device=scores.device).repeat_interleave(counts)
    values = torch.tensor([value for _, _, value in parts], dtype=scores.dtype, device=scores.device)
    return (rows, torch.cat([ids for _, ids, _ in parts])), values.repeat_interleave(counts)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _forbid_early_stops(scores: Tensor, requests: Sequence[Request], vocab_size: int) -> None:
    """Stop tokens of requests that have fewer than `min_new_tokens` get -inf, in place."""
    cells = [
        (i, token)
        for i, r in enumerate(requests)
        if len(r.output) < r.params.min_new_tokens
        for token in r.params.stop_token_ids
        if 0 <= token < vocab_size
    ]
    if cells:
        index = torch.tensor(cells, device=scores.device)
        scores[index[:, 0], index[:, 1]] = -torch.inf


def _run_processors(scores: Tensor, requests: Sequence[Request], errors: dict[int, Exception]) -> None:
    """Each request's own processors on its row, in place; one that raises fails its request only."""
    for i, request in enumerate(requests):
        if not request.params.logits_processors:
            continue
        ids = torch.tensor([[*request.prompt, *request.output]], device=scores.device)
        try:
            row = scores[i : i + 1].clone()
            for processor in request.params.logits_processors:
                row = processor(ids, row)
            if not isinstance(row, Tensor) or row.shape != scores[i : i + 1].shape:
                raise ValueError(
                    f"a logits processor must return scores of shape {[1, scores.shape[1]]}, got "
                    f"{list(row.shape) if isinstance(row, Tensor) else type(row).__name__}"
                )
            scores[i] = row[0]
        except Exception as error:  # the request's own code: it fails this request and no other
            errors[i] = error


def _draw(scores: Tensor, requests: list[Request]) -> tuple[list[int], list[bool]]:
    """Sample one token per row.

    scores: fp32 [m, vocab], divided in place by the temperature; where they are to be reported, -inf where cut off.
    Returns the tokens, and which rows had nothing to sample from.
    """
    params = [r.params for r in requests]
    scores /= _column([p.temperature for p in params], scores)
    broken = ~scores.amax(-1).isfinite()
    failed = broken.tolist()
    if any(failed):
        scores[broken] = 0.0  # any finite number
    _keep_top_k(scores, params)
    draws = uniform([r.seed for r in requests], [r.sample for r in requests], [len(r.output) for r in requests])
    u = torch.from_numpy(draws).to(scores.device)
    tokens = [-1] * len(params)
    vocab_size = scores.shape[1]
    fits = [False] * len(params)
    if vocab_size > _NARROW:
        fits = ((scores > -torch.inf).sum(1) <= _NARROW).tolist()
    for narrow in (True, False):
        rows = [i for i, fit in enumerate(fits) if fit == narrow]
        if not rows:
            continue
        values = _take(scores, rows)
        if narrow:
            ids, values = _compact(values)
        weights = _weights(values)
        _cut_tail(values, weights, [params[i] for i in rows])
        chosen = _inverse_cdf(weights, _take(u, rows))
        if narrow:
            chosen = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
        for i, token in zip(rows, chosen.tolist(), strict=True):
            tokens[i] = token
        if values is not scores and any(params[i].keep_scores for i in rows):
            if narrow:
                values = scores.new_full((len(rows), vocab_size + 1), -torch.inf).scatter(1, ids, values)[:, :-1]
            scores[torch.tensor(rows, device=scores.device)] = values
    return tokens, failed


def _argmax(scores: Tensor) -> list[int]:
    """The first of the largest of each row, the first NaN where there is one."""
    if scores.device.type != "cpu":
        return scores.argmax(-1).tolist()
    places = cpu_argmax.argmax(scores)
    if places is not None:
        return places.tolist()
    known = scores if scores.dtype == torch.float64 else scores.float()
    return known.numpy().argmax(-1).tolist()  # several times as fast as torch


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """The rows of a tensor; itself, not a copy, where they are all."""
    return tensor if len(rows) == len(tensor) else tensor[torch.tensor(rows, device=tensor.device)]


def _keep_top_k(scores: Tensor, params: list[SamplingParams]) -> None:
    """-inf below the k-th best score of a row, in place; what equals it stays, as in transformers."""
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < scores.shape[1]]
    if not rows:
        return
    k = torch.tensor([params[i].top_k for i in rows], device=scores.device)
    selected = _take(scores, rows)
    kth = selected.topk(int(k.max())).values.gather(1, (k - 1).unsqueeze(1))
    selected.masked_fill_(selected < kth, -torch.inf)
    if selected is not scores:
        scores[torch.tensor(rows, device=scores.device)] = selected


def _compact(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The entries above -inf of each row, in the order of the vocabulary, at a fixed width.

    scores: [m, vocab], at most `_NARROW` such entries in a row.  Returns ids int64 and scores [m, _NARROW], padded with
    id `vocab` and -inf.
    """
    mask = scores > -torch.inf
    row, column = mask.nonzero(as_tuple=True)
    counts = mask.sum(1)
    place = torch.arange(len(row), device=scores.device) - (counts.cumsum(0) - counts)[row]
    ids = column.new_full((len(scores), _NARROW), scores.shape[1])
    values = scores.new_full((len(scores), _NARROW), -torch.inf)
    ids[row, place] = column
    values[row, place] = scores[row, column]
    return ids, values


def _weights(scores: Tensor) -> Tensor:
    """Probabilities of scores [m, width] as int64, in units of 1 / _WEIGHT_SCALE."""
    return scores.softmax(-1).mul_(_WEIGHT_SCALE).long()


def _cut_tail(scores: Tensor, weights: Tensor, params: list[SamplingParams]) -> None:
    """Top-p, then min-p, in place: -inf and weight 0 for what they cut off. scores fp32, weights int64 [m, width]."""
    for rows, cut in (
        ([i for i, p in enumerate(params) if p.top_p < 1], _outside_top_p),
        ([i for i, p in enumerate(params) if p.min_p > 0], _below_min_p),
    ):
        if rows:
            index = torch.tensor(rows, device=scores.device)
            gone = cut(_take(scores, rows), _take(weights, rows), [params[i] for i in rows])
            scores[index] = _take(scores, rows).masked_fill(gone, -torch.inf)
            weights[index] = _take(weights, rows).masked_fill(gone, 0)


def _outside_top_p(scores: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """What does not belong to the smallest set of at least top_p of the mass; bool [m, width].

    As in transformers, entries go from the least likely up while their sum stays within 1 - top_p. Of equal ones the
    first stays longest (in transformers that is left open).
    """
    total = weights.sum(1)
    limit = (total.double() * (1 - torch.tensor([p.top_p for p in params], device=scores.device).double())).long()
    if scores.shape[1] <= _NARROW:
        return _least_likely(scores, weights, limit)
    # where the best _NARROW hold the set, all others go, and only the best need sorting
    best = scores >= scores.topk(_NARROW).values[:, -1:]
    others = total - weights.masked_fill(~best, 0).sum(1)
    fits = (others <= limit) & (best.sum(1) <= _NARROW)
    gone = torch.ones_like(best)
    if fits.any():
        ids, values = _compact(scores[fits].masked_fill(~best[fits], -torch.inf))
        padded = torch.nn.functional.pad(weights[fits], (0, 1))
        narrow = _least_likely(values, padded.gather(1, ids), limit[fits] - others[fits])
        gone[fits] = gone.new_ones(padded.shape).scatter(1, ids, narrow)[:, :-1]
    if not fits.all():
        gone[~fits] = _least_likely(scores[~fits], weights[~fits], limit[~fits])
    return gone


def _least_likely(scores: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """The least likely of scores [m, width] whose weights sum to at most limit [m], never all; bool [m, width]."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    from_here_down = ordered.sum(1, keepdim=True) - ordered.cumsum(1) + ordered
    gone = from_here_down <= limit.unsqueeze(1)
    gone[:, 0] = False
    return torch.empty_like(gone).scatter(1, order, gone)


def _below_min_p(scores: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """What is less likely than min_p times the most likely; bool [m, width]."""
    min_p = torch.tensor([p.min_p for p in params], device=weights.device).double()
    return weights.double() < (weights.amax(1).double() * min_p).unsqueeze(1)


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The first column at which the running sum of int64 weights [m, width] passes the fraction u [m] of all."""
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    target = (u * total.double()).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _report(result: SampledTokens, logits: Tensor, scores: Tensor, requests: Sequence[Request]) -> None:
    """Fill in what the requests asked to see."""
    ok = [(i, r.params) for i, r in enumerate(requests) if i not in result.errors]
    for i, params in ok:
        if params.keep_logits:
            result.logits[i] = logits[i].to(torch.float32, copy=True)
        if params.keep_scores:
            result.scores[i] = scores[i].clone()
    asking = [i for i, params in ok if params.logprobs is not None]
    if not asking:
        return
    logprobs = logits[torch.tensor(asking, device=logits.device)].float().log_softmax(-1)
    # always the same number, so that how ties are ordered does not depend on the other rows
    best, ids = (t.tolist() for t in logprobs.topk(min(_MAX_LOGPROBS, logprobs.shape[1])))
    for place, i in enumerate(asking):
        token, count = result.token_ids[i], requests[i].params.logprobs or 0
        chosen = {token: float(logprobs[place, token])}
        result.logprobs[i] = chosen | dict(zip(ids[place][:count], best[place][:count], strict=True))
