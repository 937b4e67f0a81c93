"""Who runs: admission, the prefill slices of a step, preemption under memory pressure."""

import bisect

import numpy as np

from ..config import EngineConfig
from .batch import PrefillSlice
from .request import Request, Status
from .tables import RequestTables


class SliceBudget:
    """How many token-layers of prefill a step may carry.

    Without decodes as many as `max_batched_tokens`. Beside decodes only as many as keep the step within
    `decode_slowdown` times the decodes' own time, as measured on the steps so far (moving averages), and at least
    MIN_SLICE, so that a prompt always advances. A mixed step measures one of the two: the decodes where their number
    has changed since they were measured, else the token-layers.
    """

    MIN_SLICE = 16
    WEIGHT = 0.25  # of the newest measurement

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.decode_us = 0.0
        self.measured_decodes = 0  # the number of decodes that decode_us is for, 0 while there was none
        self.token_layer_us: float | None = None

    def allow(self, num_decodes: int) -> int:
        """Token-layers for the next step."""
        limit, slowdown = self.config.max_batched_tokens, self.config.decode_slowdown
        if not num_decodes or slowdown is None:
            return limit
        if not self.measured_decodes or not self.token_layer_us:
            return min(limit, self.MIN_SLICE)
        return min(limit, max(self.MIN_SLICE, int((slowdown - 1) * self.decode_us / self.token_layer_us)))

    def observe(self, num_decodes: int, token_layers: int, elapsed_us: float) -> None:
        """What a step with so many decodes and token-layers took."""
        if token_layers and num_decodes in (0, self.measured_decodes):
            prefill_us = max(0.0, elapsed_us - (self.decode_us if num_decodes else 0.0))
            self.token_layer_us = self._mix(self.token_layer_us, prefill_us / token_layers)
        elif num_decodes:
            known = self.decode_us if num_decodes == self.measured_decodes else None
            self.decode_us = self._mix(known, max(0.0, elapsed_us - token_layers * (self.token_layer_us or 0.0)))
            self.measured_decodes = num_decodes

    def _mix(self, old: float | None, new: float) -> float:
        return new if old is None else (1 - self.WEIGHT) * old + self.WEIGHT * new


class Scheduler:
    """First come, first served within a priority; a preempted request keeps its place in the line."""

    def __init__(self, config: EngineConfig, tables: RequestTables, num_layers: int) -> None:
        self.config, self.tables, self.num_layers = config, tables, num_layers
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Into the line."""
        bisect.insort(self.waiting, request, key=lambda r: r.rank)

    def admit(self) -> list[Request]:
        """Requests from the head of the line whose prompts fit now, with a slot and a reservation in every layer.

        The head is never overtaken: a long prompt cannot starve. One page per attention layer of each running request
        stays free, so that admitting does not preempt in the next step.
        """
        admitted = []
        while self.waiting and self.tables.free_slots:
            request = self.waiting[0]
            routes = self.known_routes(request)
            needed = self.tables.pages_for_all(routes, len(request.prompt))
            headroom = self.num_layers * len(self.running)
            if needed + headroom > self.tables.pool.available and (self.running or needed > self.tables.pool.available):
                break
            self.waiting.pop(0)
            request.slot = self.tables.open(routes, len(request.prompt))
            request.status = Status.PREFILL
            self.running.append(request)
            admitted.append(request)
        return admitted

    def known_routes(self, request: Request) -> list[int]:
        """A route per layer: chosen before a preemption, forced, or -1."""
        return [*request.routes, *request.forced[len(request.routes) :]]

    def make_room(self) -> list[Request]:
        """The decodes of this step, each with a page for its next token in every attention layer.

        Where pages are short the youngest running request is preempted: it gives back everything and goes to its
        place in the line, to be computed again with the routes it has chosen.
        """
        decodes = [r for r in self.running if r.status is Status.DECODE]
        if not decodes:
            return []
        growing = self.tables.growth(np.array([r.slot for r in decodes]))
        for request, pages in zip(decodes, growing.tolist(), strict=True):
            if not pages or request.status is not Status.DECODE:
                continue
            while self.tables.pool.available < pages and request.status is Status.DECODE:
                self.preempt(max(self.running, key=lambda r: r.rank))
            if request.status is Status.DECODE:
                self.tables.grow(request.slot)
        return [r for r in decodes if r.status is Status.DECODE]

    def preempt(self, request: Request) -> None:
        """Back into the line without memory. Its tokens, routes and place in the line stay."""
        self.running.remove(request)
        self.tables.close(request.slot)
        request.slot = -1
        request.status = Status.WAITING
        request.prefill = None
        request.replayed = 0
        request.scores.clear()
        self.preemptions += 1
        self.add(request)

    def finish(self, request: Request) -> None:
        """Out of the line or of the running requests, its memory given back."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.tables.close(request.slot)
            request.slot = -1
        request.status = Status.FINISHED
        request.prefill = None

    def plan_prefill(self, budget: int) -> list[tuple[PrefillSlice, ...]]:
        """The slices of each layer for this step, within a budget of token-layers, oldest prompt first.

        A layer's next slice of a prompt follows its last; the layer after starts when all its rows have left.
        """
        plan: list[list[PrefillSlice]] = [[] for _ in range(self.num_layers)]
        for request in sorted((r for r in self.running if r.status is Status.PREFILL), key=lambda r: r.rank):
            progress, total = request.progress, len(request.prompt)
            while budget and progress.layer_idx < self.num_layers:
                start = progress.done_tokens
                end = min(total, start + budget)
                plan[progress.layer_idx].append(PrefillSlice(request, start, end))
                budget -= end - start
                progress.done_tokens = end
                if end == total:
                    progress.layer_idx, progress.done_tokens = progress.layer_idx + 1, 0
            if not budget:
                break
        return [tuple(slices) for slices in plan]
