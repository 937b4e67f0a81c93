"""Who runs: admission, the prefill slices of a step, preemption under memory pressure."""

import bisect
import math
from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from .batch import PrefillSlice
from .cache_tree import common_prefix
from .context_cache import ContextCache
from .prefix_reuse import PrefixReuse
from .request import Request, Status
from .tables import RequestTables

MIN_SHARED = 16  # tokens of a common prefix that are worth waiting for


@dataclass
class Allowance:
    """Prefill that a step may still carry: `tokens` token-layers that take at most `us` microseconds.

    slice_us, token_us: what a slice takes, and each of its rows on top.  floor: the first slice gets as many rows as
    this whatever they take, so that a prompt always advances.
    """

    tokens: int
    us: float
    slice_us: float
    token_us: float
    floor: int

    def take(self, rows: int) -> int:
        """How many of so many rows of one layer go with this step; they are taken off."""
        fit = min(rows, self.tokens)
        if math.isfinite(self.us):
            affordable = (self.us - self.slice_us) / self.token_us if self.token_us else 0.0
            fit = min(fit, max(int(affordable), self.floor))
        if fit <= 0:
            return 0
        self.tokens, self.us, self.floor = self.tokens - fit, self.us - self.slice_us - fit * self.token_us, 0
        return fit


class SliceBudget:
    """How much prefill a step may carry.

    Without decodes `max_batched_tokens` token-layers. Beside decodes only as many as keep the step within
    `decode_slowdown` times the decodes' own time, as found on the steps so far, and at least MIN_SLICE. A mixed step
    tells of one of the two: of the decodes where their number has changed since they were measured, else of the
    prefill. A slice costs something whatever its size (a launch of every operator), so its time is fitted as a constant
    and a time per row, by least squares of the relative error over the last steps.
    """

    MIN_SLICE = 16
    WEIGHT = 0.25  # of the newest measurement of decodes
    MEMORY = 0.85  # of the sums for the prefill, from step to step

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.decode_us = 0.0
        self.measured_decodes = 0  # the number of decodes that decode_us is for, 0 while there was none
        self.slice_us, self.token_us = 0.0, 0.0
        self._sums = np.zeros((2, 3))  # normal equations: slices and rows, over the time

    def allow(self, num_decodes: int) -> Allowance:
        """What the next step may carry."""
        limit, slowdown = self.config.max_batched_tokens, self.config.decode_slowdown
        us = math.inf
        if num_decodes and slowdown is not None:
            us = (slowdown - 1) * self.decode_us if self.measured_decodes else 0.0
        return Allowance(limit, us, self.slice_us, self.token_us, self.MIN_SLICE)

    def observe(self, num_decodes: int, slices: int, token_layers: int, elapsed_us: float) -> None:
        """What a step with so many decodes, slices and token-layers took."""
        prefill_us = slices * self.slice_us + token_layers * self.token_us
        if token_layers and num_decodes in (0, self.measured_decodes):
            self._fit(slices, token_layers, max(1.0, elapsed_us - (self.decode_us if num_decodes else 0.0)))
        elif num_decodes:
            new = max(0.0, elapsed_us - prefill_us)
            known = num_decodes == self.measured_decodes
            self.decode_us = (1 - self.WEIGHT) * self.decode_us + self.WEIGHT * new if known else new
            self.measured_decodes = num_decodes

    def _fit(self, slices: int, token_layers: int, us: float) -> None:
        terms = np.array([slices / us, token_layers / us, 1.0])
        self._sums = self.MEMORY * self._sums + np.outer(terms[:2], terms)
        (ss, st, sy), (_, tt, ty) = self._sums.tolist()
        det = ss * tt - st * st
        slice_us = (sy * tt - ty * st) / det if det > 1e-6 * ss * tt else 0.0
        token_us = (ty * ss - sy * st) / det if det > 1e-6 * ss * tt else 0.0
        if slice_us < 0 or token_us <= 0:  # the steps were too alike to tell the two apart
            slice_us, token_us = 0.0, ty / tt
        self.slice_us, self.token_us = slice_us, token_us


class Scheduler:
    """First come, first served within a priority; a preempted request keeps its place in the line."""

    def __init__(
        self, config: EngineConfig, tables: RequestTables, num_layers: int, cache: ContextCache | None, grid: int
    ) -> None:
        """cache: the context cache, or None.  grid: SSM states can be resumed at multiples of it."""
        self.config, self.tables, self.num_layers = config, tables, num_layers
        self.cache, self.grid = cache, grid
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Into the line."""
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    def admit(self) -> list[tuple[Request, PrefixReuse | None]]:
        """Requests from the head of the line whose prompts fit now, with a slot and a reservation in every layer.

        The head is never overtaken: a long prompt cannot starve. A request whose prefix is being computed by another
        steps aside once until that is done. One page per attention layer of each running request stays free, so that
        admitting does not preempt in the next step. Returns each with what it will take from the context cache.
        """
        admitted = []
        for request in list(self.waiting):
            if not self.tables.free_slots:
                break
            if self._waits(request):
                continue
            routes = request.known_routes
            reuse = self._look_up(request, request.first_logit_row)
            if not self._fits(routes, request, reuse) and reuse is not None and not self.running:
                reuse.close()  # its own prefix may be what is in the way
                reuse = self._look_up(request, 0)
            if not self._fits(routes, request, reuse):
                if reuse is not None:
                    reuse.close()
                break
            self.waiting.remove(request)
            if reuse is not None:
                reuse.begin()
            scratch = reuse is not None and reuse.length > 0
            request.slot = self.tables.open(routes, len(request.prompt), scratch)
            request.status, request.waits_for = Status.PREFILL, None
            self.running.append(request)
            admitted.append((request, reuse))
        return admitted

    def _look_up(self, request: Request, most: int) -> PrefixReuse | None:
        return None if self.cache is None else PrefixReuse(self.cache, request.tokens, most, self.grid)

    def _fits(self, routes: list[int], request: Request, reuse: PrefixReuse | None) -> bool:
        """Whether the pool has room for a prompt and, where it reuses a prefix, a scratch state."""
        needed = self.tables.pages_for_all(routes, len(request.prompt))
        if reuse is not None and reuse.length:
            needed += self.tables.layout.entry_pages
        headroom = self.num_layers * len(self.running)
        return self._make_available(needed + headroom) or (not self.running and self._make_available(needed))

    def _make_available(self, num_pages: int) -> bool:
        """Whether so many pages can be had without taking any from a running request; the cache gives way."""
        if self.cache is not None:
            return self.cache.reclaim(num_pages)
        return self.tables.pool.available >= num_pages

    def _waits(self, request: Request) -> bool:
        """Whether the request lets a running prefill compute and publish a prefix of both first."""
        if self.cache is None:
            return False
        if request.waits_for is not None:
            return request.waits_for.status is Status.PREFILL
        for other in self.running:
            if other.status is not Status.PREFILL or other.forced[0] != request.forced[0]:
                continue
            shared = common_prefix(other.tokens, request.tokens[: request.first_logit_row])
            if shared >= MIN_SHARED and shared > self.cache.match(request.tokens[:shared])[1]:
                request.waits_for = other
                return True
        return False

    def make_room(self) -> list[Request]:
        """The decodes of this step, each with a page for its next token in every attention layer.

        Where pages are short the youngest running request is preempted: it gives back everything and goes to its
        place in the line, to be computed again with the routes it has chosen.
        """
        decodes = [r for r in self.running if r.status is Status.DECODE]
        if not decodes:
            return []
        growing = self.tables.growth(np.array([r.slot for r in decodes]))
        if not growing.any():
            return decodes
        for request, pages in zip(decodes, growing.tolist(), strict=True):
            if not pages or request.status is not Status.DECODE:
                continue
            while not self._make_available(pages) and request.status is Status.DECODE:
                self.preempt(max(self.running, key=lambda r: r.rank))
            if request.status is Status.DECODE:
                self.tables.grow(request.slot)
        return [r for r in decodes if r.status is Status.DECODE]

    def preempt(self, request: Request) -> None:
        """Back into the line without memory. Its tokens, routes and place in the line stay."""
        self._take_out(request)
        request.status = Status.WAITING
        request.replayed = 0
        request.scores.clear()
        self.preemptions += 1
        self.add(request)

    def finish(self, request: Request) -> None:
        """Out of the line or of the running requests, its memory given back."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._take_out(request)
        request.status = Status.FINISHED

    def _take_out(self, request: Request) -> None:
        """Out of the running requests, with all it holds given back."""
        self.running.remove(request)
        if request.reuse is not None:
            request.reuse.close()
        request.prefill = None
        self.tables.close(request.slot)
        request.slot = -1

    def plan_prefill(self, allowance: Allowance) -> list[tuple[PrefillSlice, ...]]:
        """The slices of each layer for this step, within what is allowed, oldest prompt first.

        A layer's next slice of a prompt follows its last; the layer after starts when all its rows have left. What is
        planned here may still change: a request that cannot go on at a layer drops out of the rest of the step.
        """
        plan: list[list[PrefillSlice]] = [[] for _ in range(self.num_layers)]
        for request in sorted((r for r in self.running if r.status is Status.PREFILL), key=lambda r: r.rank):
            progress = request.progress
            while progress.stages:
                stage = progress.stages[0]
                start = max(stage.start, progress.done)
                end = start + allowance.take(stage.end - start)
                if end == start:
                    break
                plan[stage.layer_idx].append(PrefillSlice(request, start, end, stage.kind, start == stage.start))
                progress.done = end
                if end == stage.end:
                    progress.stages.popleft()
                    progress.done = 0
        return [tuple(slices) for slices in plan]
