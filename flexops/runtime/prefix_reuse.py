"""How one prompt uses the context cache: layer by layer, each from the best of what is there (§6.1).

The text match comes first; the layout is found layer by layer as the gates run. `start` is the first row that passes
a layer. It stays while every layer can start from what the cache holds there, and falls where one cannot: then the
rows that enter the layer are loaded, or computed again from the deepest layer below that still has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import ATTENTION, SSM
from .cache_tree import Captures, ContextNode, Entry, Kind, RouteNode
from .context_cache import ContextCache

REFILL_COST = 0.4  # of a row through a mixer alone, where a row through the whole layer costs 1
MOST_STARTS = 6  # token counts that a plan considers to start from


@dataclass(frozen=True)
class Move:
    """How a request enters a layer.

    start: the first row that passes the layer.  resume: tokens whose KV or state is taken from the cache; the rows
    [resume, start) pass the layer's mixer alone.  The rows [resume, old start) must be had at the layer's input:
    loaded there (replay_layer is the layer), or the rows [replay_from, old start) loaded at `replay_layer` and passed
    through the layers up to this one once more.
    """

    start: int
    resume: int
    replay_layer: int
    replay_from: int


class _Level:
    """What the cache holds for one layer, on the nodes of a prefix, where the layers below and itself take routes."""

    def __init__(
        self, path: Sequence[ContextNode], before: Sequence[RouteNode | None], route: int, layer_idx: int
    ) -> None:
        self.route = route
        self.spans = [(node.start, node.end) for node in path]
        self.has_hidden = [layer_idx == 0 or (n is not None and n.hidden is not None) for n in before]
        self.gate_end = _covered(path, [n is not None and n.gate is not None for n in before])
        self.after = [None if n is None else n.children.get(route) for n in before]
        self.kv_end = _covered(path, [n is not None and n.kv is not None for n in self.after])
        self.states = {position for n in self.after if n is not None for position in n.states}

    def holds(self, position: int) -> bool:
        """Whether the mixer can start behind so many tokens."""
        if not position:
            return True
        return position <= self.kv_end if self.route == ATTENTION else position in self.states

    def has_rows(self, start: int, end: int) -> bool:
        """Whether the rows [start, end) that enter the layer are there."""
        spans = zip(self.spans, self.has_hidden, strict=True)
        return all(has for (first, last), has in spans if first < end and last > start)


def _covered(path: Sequence[ContextNode], there: Sequence[bool]) -> int:
    """Tokens from the first on whose nodes all have something."""
    end = 0
    for node, has in zip(path, there, strict=True):
        if not has:
            break
        end = node.end
    return end


class PrefixReuse:
    """What one prefill takes from the cache and leaves there. Pins the matched prefix until `close`."""

    def __init__(self, cache: ContextCache, tokens: np.ndarray, most: int, grid: int) -> None:
        """tokens: int32, the prompt.  most: at most so many of them are reused.  grid: states lie at multiples."""
        self.cache, self.tokens, self.grid = cache, tokens, grid
        self.node, self.length = cache.match(tokens[:most])
        self.clock = cache.clock
        cache.pin(self.node)
        self.captures = Captures()
        cache.register(self.captures)
        self._found: list[_Level] = []  # by layer, along _routes, when the cache had cut _splits nodes
        self._routes: list[int] = []
        self._splits = -1

    def begin(self) -> None:
        """The request is admitted: from now on its lookup counts, as the clock tells."""
        self.cache.clock += 1
        self.clock = self.cache.clock

    def close(self) -> None:
        """Unpin the prefix; captures that were not published go back."""
        self.cache.unpin(self.node)
        self.cache.discard(self.captures)

    # --- deciding -------------------------------------------------------------------------------------------------

    def first_start(self, routes: Sequence[int]) -> int:
        """The first row that passes layer 0. routes: a code per layer, -1 unknown."""
        if not self.length:
            return 0
        self._look(routes)
        if self.cache.mode == "hybrid":
            return self.length
        undecided = [route < 0 for route in routes]
        whole = (p for p in (self.length, *self._starts(self.length)) if self._holds(0, p, undecided))
        return next(whole, 0)

    def gate_rows(self, layer_idx: int, start: int) -> Tensor | None:
        """The gate rows of the tokens before start at the layer, or None where some are missing."""
        nodes = self._before(layer_idx)
        parts = []
        for part, node in zip(self.node.path(), nodes, strict=True):
            if part.start >= start:
                break
            if node is None or node.gate is None:
                return None
            parts.append(node.gate[: start - part.start])
        return torch.cat(parts) if parts else None

    def move(self, layer_idx: int, routes: Sequence[int], start: int, gated: bool) -> Move:
        """How to enter a layer with rows from `start` on.

        routes: a code per layer, -1 where a gate has yet to choose.  gated: the layer's own gate has not run, because
        the cache lacks gate rows before `start`; then the move brings the rows that give them, whatever the route.
        """
        if not start:
            return Move(0, 0, layer_idx, 0)
        self._look(routes)
        levels = self._levels
        undecided = [route < 0 and i >= layer_idx + (not gated) for i, route in enumerate(routes)]
        if self.cache.mode == "conventional":
            keeps = levels[layer_idx].holds(start) and not gated
            return Move(start, start, layer_idx, start) if keeps else Move(0, 0, 0, 0)
        if not gated and self._holds(layer_idx, start, undecided):
            return Move(start, start, layer_idx, start)
        return _Planner(levels, len(self.tokens), self._starts(start), undecided).best(layer_idx, start)[1]

    def _holds(self, layer_idx: int, start: int, undecided: Sequence[bool]) -> bool:
        """Whether every layer from layer_idx on can start behind so many tokens, and the gates have their rows."""
        rest = range(layer_idx, len(self._levels))
        levels = self._levels
        return all(levels[i].holds(start) and (not undecided[i] or levels[i].gate_end >= start) for i in rest)

    def _look(self, routes: Sequence[int]) -> None:
        """Make the levels agree with the routes known; unknown ones follow what was used last."""
        num_known = next((i for i, route in enumerate(routes) if route < 0), len(routes))
        if self._routes[:num_known] != list(routes[:num_known]) or not self._routes:
            here: list[RouteNode | None] = [node.root for node in self.node.path()]
            self._routes = []
            for known in routes:
                route = known if known >= 0 else _likely(here)
                self._routes.append(route)
                here = [None if n is None else n.children.get(route) for n in here]
            self._splits = -1

    @property
    def _levels(self) -> list[_Level]:
        """What the cache holds per layer along the routes; empty where nothing was matched."""
        if self._splits != self.cache.splits and self._routes:
            path = self.node.path()
            here: Sequence[RouteNode | None] = [node.root for node in path]
            self._found, self._splits = [], self.cache.splits
            for layer_idx, route in enumerate(self._routes):
                self._found.append(_Level(path, here, route, layer_idx))
                here = self._found[-1].after
        return self._found

    def _before(self, layer_idx: int) -> list[RouteNode | None]:
        if layer_idx:
            return self._levels[layer_idx - 1].after
        return [node.root for node in self.node.path()]

    def _starts(self, start: int) -> list[int]:
        """Token counts worth starting from, most first: node ends and states up to `start`."""
        states = {position for level in self._levels for position in level.states}
        ends = {node.end for node in self.node.path()}
        return [*sorted((p for p in states | ends if p < start), reverse=True)[:MOST_STARTS], 0]

    # --- consuming ------------------------------------------------------------------------------------------------

    def kv_pages(self, layer_idx: int, length: int) -> np.ndarray:
        """int32, the pages that hold the KV of the first `length` tokens in an attention layer."""
        entries = self._spans(self._levels[layer_idx].after, Kind.KV, 0, length)
        self.cache.touch(entries, self.clock)
        rows = self.cache.pool.layout.page_tokens
        pages = np.full((length - 1) // rows + 1, -1, dtype=np.int32)
        for entry in entries:  # who wrote the later tokens had the earlier ones on the same page
            column = entry.start // rows
            pages[column : column + len(entry.pages)] = entry.pages[: len(pages) - column]
        return pages

    def state_pages(self, layer_idx: int, length: int) -> np.ndarray:
        """int32, the pages of the state and conv window after `length` tokens in an SSM layer."""
        found = [n.states[length] for n in self._levels[layer_idx].after if n is not None and length in n.states]
        self.cache.touch(found[:1], self.clock)
        return found[0].pages

    def load_hidden(self, layer_idx: int, start: int, end: int, target: Tensor) -> None:
        """Copy the rows [start, end) that enter a layer (above 0) into target [prompt, hidden_size]."""
        entries = self._spans(self._before(layer_idx), Kind.HIDDEN, start, end)
        self.cache.touch(entries, self.clock)
        rows, device = self.cache.hidden_tokens, target.device
        for entry in entries:  # each has its own rows alone: a page of two entries is whole in neither
            first, last = max(start, entry.start), min(end, entry.end)
            column, offset = np.divmod(np.arange(first, last), rows)
            pages = entry.pages[column - entry.start // rows].astype(np.int64)
            place = torch.from_numpy(pages).to(device), torch.from_numpy(offset).to(device)
            target[first:last] = self.cache.pool.hidden_cache[place]

    def _spans(self, nodes: Sequence[RouteNode | None], kind: Kind, start: int, end: int) -> list[Entry]:
        """The entries of a kind whose tokens meet [start, end), in order."""
        entries = [None if n is None else n.kv if kind is Kind.KV else n.hidden for n in nodes]
        return [entry for entry in entries if entry is not None and entry.start < end and entry.end > start]

    # --- leaving --------------------------------------------------------------------------------------------------

    def capture_hidden(self, layer_idx: int, start: int, routes: Sequence[int]) -> None:
        """Take pages for the rows that enter a layer from `start` on, where the cache lacks them and has room.

        routes: those that the request has taken, of the layers below at least.

        Without them, whoever takes another route from here on has to compute the prefix from the first layer. Where
        this request does, that has happened; elsewhere it is as likely as layouts were seen to part at this layer.
        """
        rows, retention = self.cache.hidden_tokens, self.cache.retention
        if not rows or not layer_idx or self.captures.closed or layer_idx in self.captures.hidden:
            return
        levels, first = self._levels, start
        if levels and start < self.length and levels[layer_idx].has_rows(start, self.length):
            first = self.length
        if first >= len(self.tokens):
            return
        end = len(self.tokens)
        node = self._before(layer_idx)[-1] if self.length else None
        share = retention.parting_share(node, routes, layer_idx)
        if first < self.length and node is not None and set(node.children) - {levels[layer_idx].route}:
            end, share = self.length, 1.0
        below_us = sum(retention.layer_us(i, route) for i, route in enumerate(routes[:layer_idx]))
        saved_us = self._rate(first) * share * (end - first) * below_us
        pages = self.cache.acquire(layer_idx, (end - 1) // rows + 1 - first // rows, saved_us)
        if pages is not None:
            self.captures.hidden[layer_idx] = (first, end, pages)

    def capture_states(self, layer_idx: int, resume: int, routes: Sequence[int]) -> None:
        """Take pages for the states that an SSM layer passes behind `resume` tokens and that are worth keeping.

        routes: those that the request has taken, up to this layer at least.
        """
        if self.captures.closed or layer_idx in self.captures.states:
            return
        have = self._levels[layer_idx].states if self._levels else set()
        captured = self.captures.states.setdefault(layer_idx, {})
        wanted = [p for p in self.checkpoints() if p > resume and p not in have]
        if not wanted:
            return
        known, retention = sorted({0, *have}), self.cache.retention
        share = retention.share_with(self.node if self.length else None, routes[: layer_idx + 1])
        layer_us = share * retention.layer_us(layer_idx, SSM)
        for position in wanted:
            since = position - max(p for p in known if p < position)
            saved_us = self._rate(position - 1) * since * layer_us
            pages = self.cache.acquire(layer_idx, self.cache.pool.layout.entry_pages, saved_us)
            if pages is not None:
                captured[position] = pages
                known.append(position)

    def _rate(self, row: int) -> float:
        """How often the text up to a row is expected to come again, in uses per lookup."""
        rates = self.cache.retention.rates
        if not self.length:
            return rates.of_new(continues=False)
        known = rates.of(self.node)
        return known if row < self.length else min(known, rates.of_new(continues=True))

    def checkpoints(self) -> list[int]:
        """Token counts at which states are worth keeping, ascending: the last ones, the branch point, halves.

        All but the last token (the same prompt again needs that one alone), the last chunk's end, where this prompt
        left the known ones, and halves of the prompt, on the grid.
        """
        chunk = self.grid if self.grid > 1 else 64
        last = len(self.tokens) - 1
        wanted = {last, self.length, *(last // 2**k // chunk * chunk for k in range(4))}
        return sorted(p for p in wanted if 0 < p <= last and p % self.grid == 0)


def _likely(nodes: Sequence[RouteNode | None]) -> int:
    """The route that the deepest node with a choice used last; SSM where nothing is known."""
    for node in reversed(nodes):
        if node is not None and node.children:
            return next(reversed(node.children))
    return SSM


class _Planner:
    """The cheapest way through the layers, in rows times layers, by recursion over (layer, start)."""

    def __init__(
        self, levels: Sequence[_Level], num_tokens: int, starts: Sequence[int], undecided: Sequence[bool]
    ) -> None:
        self.levels, self.num_tokens, self.starts, self.undecided = levels, num_tokens, starts, undecided
        self._known: dict[tuple[int, int], tuple[float, Move]] = {}

    def best(self, layer_idx: int, start: int) -> tuple[float, Move]:
        """Cost from a layer on, and the move that enters it."""
        if layer_idx == len(self.levels):
            return 0.0, Move(start, start, layer_idx, start)
        if (layer_idx, start) not in self._known:
            self._known[layer_idx, start] = min(self._moves(layer_idx, start), key=lambda option: option[0])
        return self._known[layer_idx, start]

    def _moves(self, layer_idx: int, start: int) -> list[tuple[float, Move]]:
        level, rows = self.levels[layer_idx], self.num_tokens
        needs_rows = self.undecided[layer_idx] and start > level.gate_end
        options: list[tuple[float, Move]] = []
        if level.holds(start) and not needs_rows:
            cost = rows - start + self.best(layer_idx + 1, start)[0]
            options.append((cost, Move(start, start, layer_idx, start)))
        may_refill = not needs_rows
        for resume in (p for p in self.starts if p < start):
            if resume > level.gate_end if needs_rows else not level.holds(resume):
                continue
            had, source, first = self._fetch(layer_idx, resume, start)
            if may_refill:  # from the latest point alone: an earlier one refills more and gains nothing
                may_refill = False
                cost = had + REFILL_COST * (start - resume) + rows - start + self.best(layer_idx + 1, start)[0]
                options.append((cost, Move(start, resume, source, first)))
            # where the gate has yet to run, the layer is entered again from there
            onward = self.best(layer_idx, resume) if needs_rows else self.best(layer_idx + 1, resume)
            cost = had + onward[0] + (0 if needs_rows else rows - resume)
            options.append((cost, Move(resume, resume, source, first)))
        return options

    def _fetch(self, layer_idx: int, start: int, end: int) -> tuple[float, int, int]:
        """The cheapest way to the rows [start, end) at a layer's input: cost, layer to load them at, first row."""
        if self.levels[layer_idx].has_rows(start, end):
            return 0.0, layer_idx, start
        best: tuple[float, int, int] = (float("inf"), 0, 0)
        froms = [p for p in self.starts if p <= start]
        for source in range(layer_idx - 1, -1, -1):
            level = self.levels[source]
            # a replay reads the KV that the request has there, but an SSM layer needs a state to start from
            froms = [p for p in froms if level.route == ATTENTION or level.holds(p)]
            first = froms[0]
            cost = float((layer_idx - source) * (end - first))
            if cost < best[0] and level.has_rows(first, end):
                best = (cost, source, first)
        return best
