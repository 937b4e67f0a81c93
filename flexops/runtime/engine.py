"""The engine: requests in, tokens out, one step at a time (§5, §7).

A step admits what fits, carries every decode through all layers together with slices of the waiting prompts, and
samples. Requests come and go between any two steps.
"""

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import EngineConfig
from ..kernels.linear import rows_are_exact
from ..models.layout import Layout, layout_routes, layout_strip
from ..models.modeling import FlexHybridModel
from ..models.packed import PackedModel
from .batch import PrefillSlice
from .branches import make_coordinator
from .executor import Executor
from .memory import PageLayout, PagePool
from .metrics import Metrics, decode_flops
from .profiling import find_profile, profile_key
from .publishing import make_cache, publish_answer, publish_prompt
from .request import Request, RequestOutput, SamplingParams, Status
from .sampler import SampledTokens, Sampler
from .scheduler import Scheduler, SliceBudget
from .tables import RequestTables


class Engine:
    """Continuous batching for a FlexHybridModel.

    The weights are packed when the engine is made: change them, make another engine. Not safe for use from several
    threads at once.
    """

    def __init__(
        self,
        model: FlexHybridModel,
        config: EngineConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Pack the weights and take the page pool. tokenizer: needed for `stop_strings` alone.

        Warns where the linear algebra of this machine lets a row depend on its neighbours: then tokens may depend on
        the batch. Raises ValueError where the pool would not hold one request of a single token, and for a
        `profile` that cannot be read or is not of this model on this device.
        """
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.tokenizer = tokenizer
        self.max_model_len = self.config.max_model_len or model.config.max_position_embeddings
        with torch.no_grad():
            packed = PackedModel(model, self.max_model_len)
        device, dtype = packed.embedding.device, packed.embedding.dtype
        num_layers = model.config.num_hidden_layers
        layout = PageLayout.of(model.config, dtype)
        num_pages = _pool_bytes(self.config, device) // layout.page_bytes
        self.pool = PagePool(num_pages, layout, model.config, dtype, device)
        slots = self.config.max_num_requests
        self.tables = RequestTables(num_layers, slots, self.pool, self.config.check_integrity)
        smallest = self.tables.pages_for_all(layout_routes(None, model.config), 1)
        if smallest > num_pages:
            raise ValueError(
                f"the page pool has {num_pages} pages of {layout.page_bytes} bytes, but one request needs {smallest}: "
                f"set memory_bytes to at least {smallest * layout.page_bytes}"
            )
        # a scan cut anywhere gives the same bits on a CPU; on a GPU where a chunk ends
        grid = 1 if device.type == "cpu" else model.config.mamba_chunk_size
        key = profile_key(model.config, dtype, device)
        self.profile = find_profile(key, model.config.name_or_path, self.config.profile)
        self.cache = make_cache(self.config, self.pool, model.config, dtype, self.profile)
        self.scheduler = Scheduler(self.config, self.tables, num_layers, self.cache, grid)
        keep_gates = self.cache is not None and self.config.reuse_generated
        coordinator = make_coordinator(self.config.coordination, model.config, dtype, device, self.profile)
        self.executor = Executor(packed, self.pool, self.tables, keep_gates, coordinator, self.config.static_decode)
        self.sampler = Sampler(model.config.vocab_size, device)
        self.metrics = Metrics()
        self.slice_budget = SliceBudget(self.config)
        self._requests: dict[tuple[int, int], Request] = {}  # by id and sample
        self._held: list[RequestOutput] = []  # outputs of steps that `stream` or `score` took for somebody else
        self._next_id = 0
        if device.type == "cpu" and not rows_are_exact(dtype):
            warnings.warn(
                f"{dtype} matrix products on this machine depend on the number of rows: tokens are right, but may "
                "differ in rounding between one batch and another",
                stacklevel=2,
            )

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        layout: Layout = None,
        gate_bias: float = 0.0,
        priority: int = 0,
    ) -> int:
        """Queue a prompt; returns the request's id.

        prompt: token ids.  layout: None lets the gates choose, see `layout_routes`.  gate_bias: added to every
        attention logit of this request's gates.  priority: higher goes first.

        Raises ValueError, and changes nothing, for an empty prompt, ids out of range, an unknown layout, or a request
        that could never fit.
        """
        params = params or SamplingParams()
        prompt = [int(token) for token in prompt]
        forced = layout_routes(layout, self.model_config)
        self._check_request(prompt, params, forced, gate_bias)
        seed = params.seed if params.seed is not None else int(torch.randint(2**62, (1,)).item())
        return self._queue(prompt, params, forced, gate_bias, priority, seed, gate_tokens=len(prompt)).request_id

    def _queue(
        self,
        prompt: list[int],
        params: SamplingParams,
        forced: list[int],
        gate_bias: float,
        priority: int,
        seed: int,
        gate_tokens: int,
    ) -> Request:
        request = Request(
            request_id=self._next_id,
            sample=0,
            prompt=prompt,
            params=params,
            forced=forced,
            gate_bias=float(gate_bias),
            priority=priority,
            seed=seed,
            added_at_us=_now_us(),
            gate_tokens=gate_tokens,
            first_logit_row=len(prompt) - 1,
            forks_left=params.n - 1,
        )
        self._next_id += 1
        self._requests[request.request_id, 0] = request
        self.scheduler.add(request)
        self.metrics.requests_added += 1
        return request

    def _check_request(self, prompt: list[int], params: SamplingParams, forced: list[int], gate_bias: float) -> None:
        vocab = self.model_config.vocab_size
        if not prompt:
            raise ValueError("the prompt has no tokens: give it at least one, such as the bos token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            bad = next(token for token in prompt if not 0 <= token < vocab)
            raise ValueError(
                f"token id {bad} is out of range [0, {vocab}): use the tokenizer that belongs to the model"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop_strings={params.stop_strings!r} need a tokenizer: Engine(model, config, tokenizer)")
        if gate_bias != gate_bias or gate_bias in (float("inf"), float("-inf")):
            raise ValueError(f"gate_bias={gate_bias} must be finite; use layout= to force a route")
        total = len(prompt) + params.max_new_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) + max_new_tokens ({params.max_new_tokens}) = {total} exceeds "
                f"max_model_len {self.max_model_len}: shorten the prompt or lower max_new_tokens"
            )
        needed = self.tables.pages_for_all(forced, total)
        if needed > self.pool.num_pages:
            raise ValueError(
                f"a request of {total} tokens may need {needed} pages, but the pool has {self.pool.num_pages}: "
                f"shorten it or set memory_bytes to at least {needed * self.pool.layout.page_bytes}"
            )

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def abort(self, request_id: int) -> None:
        """Drop a request with all its samples, wherever they stand; one that has finished is ignored."""
        for key in [key for key in self._requests if key[0] == request_id]:
            self._leave(self._requests[key], "abort", _now_us())

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """One iteration over everything that runs; returns what each request gave. Empty when nothing is to do."""
        with torch.cuda.device_of(self.executor.model.embedding):  # Triton launches on the current one
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started = _now_us()
        for request, reuse in self.scheduler.admit():
            self.executor.start_prefill(request, reuse)
        decodes = self.scheduler.make_room()
        plan = self.scheduler.plan_prefill(self.slice_budget.allow(len(decodes)))
        outputs, self._held = self._held, []
        for group, group_plan in self._groups(decodes, plan):
            outputs.extend(self._run(group, group_plan))
        elapsed = _now_us() - started
        rows = [s.end - s.start for slices in plan for s in slices]
        self.slice_budget.observe(len(decodes), len(rows), sum(rows), elapsed)
        self.metrics.steps += 1
        self.metrics.step_time_us += elapsed
        if self.config.check_integrity:
            self.check_integrity()
        return outputs

    def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None, layout: Layout = None, gate_bias: float = 0.0
    ) -> Iterator[RequestOutput]:
        """The outputs of one prompt as they come; leaving the loop aborts it.

        Other requests go on beside it; what they give is kept for the next `step`.
        """
        request_id = self.add_request(prompt, params, layout, gate_bias)
        try:
            while any(key[0] == request_id for key in self._requests):
                outputs = self.step()
                self._held.extend(output for output in outputs if output.request_id != request_id)
                yield from (output for output in outputs if output.request_id == request_id)
        finally:
            self.abort(request_id)

    def score(
        self, prompt: Sequence[int], continuation: Sequence[int], layout: Layout = None, gate_bias: float = 0.0
    ) -> list[float]:
        """Log-probability of each token of a continuation, given the prompt and the tokens before it.

        The gates see the prompt alone, as they would if the continuation were generated. Other requests go on beside
        it. Raises ValueError as `add_request` does, and for an empty continuation.
        """
        prompt, continuation = [int(token) for token in prompt], [int(token) for token in continuation]
        if not continuation:
            raise ValueError("the continuation has no tokens: give it at least one to score")
        forced, params = layout_routes(layout, self.model_config), SamplingParams(max_new_tokens=1)
        self._check_request(prompt, params, forced, gate_bias)
        self._check_request([*prompt, *continuation], params, forced, gate_bias)
        fed = [*prompt, *continuation[:-1]]
        request = self._queue(fed, params, forced, gate_bias, 0, seed=0, gate_tokens=len(prompt))
        request.first_logit_row = len(prompt) - 1
        request.continuation = continuation
        while (request.request_id, 0) in self._requests:
            outputs = self.step()
            self._held.extend(outputs)
        return request.scores

    def stats(self) -> dict[str, Any]:
        """Counters (`Metrics.as_dict`), queue lengths and the pool's use."""
        return {
            **self.metrics.as_dict(),
            "preemptions": self.scheduler.preemptions,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "pages": self.pool.num_pages,
            "pages_free": self.pool.free,
            "page_bytes": self.pool.layout.page_bytes,
            **({"pages_cached": self.cache.num_pages, **self.cache.stats.as_dict()} if self.cache is not None else {}),
        }

    def clear_cache(self) -> None:
        """Forget every prefix that no running prefill uses."""
        if self.cache is not None:
            self.cache.clear()

    def check_integrity(self) -> None:
        """Assert that free, cached and live pages partition the pool and that counts agree with the tables."""
        owned = [page for request in self.scheduler.running for page in self.tables.owned(request.slot)]
        if self.cache is not None:
            self.cache.check_integrity()
            owned += self.cache.owned()
        self.pool.check_integrity(owned)

    def _groups(
        self, decodes: list[Request], plan: list[tuple[PrefillSlice, ...]]
    ) -> list[tuple[list[Request], list[tuple[PrefillSlice, ...]]]]:
        """What runs as one batch: everything, or without selective batching each layout and each prompt on its own."""
        if self.config.selective_batching:
            return [(decodes, plan)] if decodes or any(plan) else []
        nothing: list[tuple[PrefillSlice, ...]] = [()] * len(plan)
        by_layout: dict[tuple[int, ...], list[Request]] = {}
        for request in decodes:
            by_layout.setdefault(tuple(request.routes), []).append(request)
        prompts = dict.fromkeys(s.request for slices in plan for s in slices)
        return [
            *((group, nothing) for group in by_layout.values()),
            *(([], [tuple(s for s in slices if s.request is r) for slices in plan]) for r in prompts),
        ]

    def _run(self, decodes: list[Request], plan: list[tuple[PrefillSlice, ...]]) -> list[RequestOutput]:
        token_ids = [r.output[r.replayed] for r in decodes]
        logits, owners = self.executor.run(decodes, token_ids, plan)
        self.tables.context[[r.slot for r in decodes]] += 1
        rows: list[int] = []  # of the logits, and whose they are
        sampling: list[Request] = []
        for i, request in enumerate(decodes):
            request.replayed += 1
            constant, per_token = request.decode_flops
            self.metrics.decode_flops += constant + per_token * (len(request.prompt) + request.replayed)
            # a preempted request computes its old tokens again; it samples when it has caught up
            if request.replayed == len(request.output):
                rows.append(i)
                sampling.append(request)
        self.metrics.decode_steps += len(decodes)
        for i, request in enumerate(owners[len(decodes) :], start=len(decodes)):
            if request.continuation:
                self._score_row(request, logits[i])
                continue
            for sample in (request, *self._end_prefill(request)):
                if not sample.output:
                    rows.append(i)
                    sampling.append(sample)
        if not sampling:
            return []
        if rows != list(range(len(logits))):
            logits = logits[torch.tensor(rows, device=logits.device)]
        return self._emit(sampling, self.sampler.sample(logits, sampling))

    def _end_prefill(self, request: Request) -> list[Request]:
        """The prompt has passed all layers: the request decodes from now on. Returns further samples split off it."""
        request.status = Status.DECODE
        self._publish_prompt(request)
        request.prefill = None
        self.tables.drop_scratch(request.slot)
        self.tables.context[request.slot] = len(request.prompt)
        request.layout, request.margins = tuple(request.routes), tuple(request.gate_margins)
        request.decode_flops = decode_flops(self.model_config, request.routes)
        if not request.output:  # not when a preempted request computes its prompt again
            self.metrics.prompt_tokens += len(request.prompt)
            self.metrics.layouts[layout_strip(request.routes)] += 1
        samples = []
        for sample in range(1, request.forks_left + 1):
            twin = dataclasses.replace(
                request,
                sample=sample,
                routes=list(request.routes),
                gate_margins=list(request.gate_margins),
                output=[],
                continuation=[],
                scores=[],
                forks_left=0,
            )
            self._requests[request.request_id, sample] = twin
            slot = self.tables.fork(request.slot)
            if slot is None:  # no room beside the first sample: this one prefills by itself later, to the same bits
                twin.slot, twin.status = -1, Status.WAITING
                self.scheduler.add(twin)
            else:
                twin.slot = slot
                self.scheduler.running.append(twin)
                samples.append(twin)
        request.forks_left = 0
        return samples

    def _publish_prompt(self, request: Request) -> None:
        if self.cache is not None:
            publish_prompt(self.cache, self.tables, request, self.executor.gate_table is not None)

    def _score_row(self, request: Request, logits: Tensor) -> None:
        token = request.continuation[len(request.scores)]
        request.scores.append(float(logits.float().log_softmax(-1)[token]))
        if len(request.scores) == len(request.continuation):
            self._publish_prompt(request)
            self._leave(request, "score", _now_us())

    def _leave(self, request: Request, reason: str, now_us: float) -> None:
        """A request ends: its memory is free, and what it computed stays in the cache alone."""
        if self.cache is not None and self.config.reuse_generated and reason in ("stop", "length"):
            publish_answer(self.cache, self.tables, request, self.executor.gate_table)
        del self._requests[request.request_id, request.sample]
        self.scheduler.finish(request)
        self.metrics.record_finished(request, reason, now_us)

    def _emit(self, requests: list[Request], sampled: SampledTokens) -> list[RequestOutput]:
        """Append the sampled tokens, end what has ended, and report."""
        now = _now_us()
        self.metrics.generated_tokens += len(requests) - len(sampled.errors)
        outputs = []
        for row, request in enumerate(requests):
            error = sampled.errors.get(row)
            reason: str | None = "error" if error is not None else None
            new_tokens: list[int] = []
            if error is None:
                token = sampled.token_ids[row]
                new_tokens = [token]
                request.output.append(token)
                if request.first_token_at_us is None:
                    request.first_token_at_us = now
                reason, error = self._finish_reason(request)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    sample=request.sample,
                    new_token_ids=new_tokens,
                    num_tokens=len(request.output),
                    _output=request.output,
                    finish_reason=reason,
                    layout=request.layout,
                    gate_margins=request.margins,
                    prompt_tokens=len(request.prompt),
                    logprobs=sampled.logprobs_of(row),
                    logits=sampled.logits_of(row),
                    scores=sampled.scores_of(row),
                    time_to_first_token_us=request.first_token_at_us
                    and request.first_token_at_us - request.added_at_us,
                    error=error,
                    cached_tokens=request.cached_tokens,
                    reused_layers=request.reused_layers,
                    saved_token_layers=request.saved_token_layers,
                )
            )
            if reason is not None:
                self._leave(request, reason, now)
        return outputs

    def _finish_reason(self, request: Request) -> tuple[str | None, Exception | None]:
        """Why a request ends with its newest token, if it does; a stop check of its own that raises ends it too."""
        params = request.params
        if request.output[-1] in params.stop_token_ids:
            return "stop", None
        if params.stop_strings and self._has_stop_string(request):
            return "stop", None
        if params.stop_checks:
            ids = torch.tensor([[*request.prompt, *request.output]])
            try:
                if any(check(ids) for check in params.stop_checks):
                    return "stop", None
            except Exception as error:  # the request's own code: it ends this request and no other
                return "error", error
        return ("length", None) if len(request.output) >= params.max_new_tokens else (None, None)

    def _has_stop_string(self, request: Request) -> bool:
        """Whether the newest token completes a stop string. Each token gives a byte or more, so a tail suffices."""
        assert self.tokenizer is not None, "checked when the request was added"
        longest = max(len(text.encode()) for text in request.params.stop_strings)
        text = self.tokenizer.decode(request.output[-longest - 1 :])
        return any(stop in text for stop in request.params.stop_strings)


def _pool_bytes(config: EngineConfig, device: torch.device) -> int:
    """Size of the page pool: as set, or a share of the memory that is free now."""
    if config.memory_bytes is not None:
        return config.memory_bytes
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * config.memory_fraction)


def _now_us() -> float:
    return time.perf_counter() * 1e6
