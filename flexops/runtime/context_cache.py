"""The context cache: an outer radix tree over tokens, an inner trie over routes, entries per layer (§6.1).

A prefix that has been computed leaves behind, per layer, what the next request with the same tokens can start from:
KV rows or an SSM state on the edge of the layer's route, and the rows that enter a layer (HIDDEN) with their gate rows
on the node before it. What an entry holds depends on the tokens and on the routes of the layers below, and on nothing
else, so both are its key.

Entries live in pages of the engine's pool that nobody else wants: a request that needs pages gets them first.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from ..kernels import ATTENTION, SSM
from .cache_tree import NEVER, Captures, ContextNode, Entry, Goal, Kind, RouteNode, Use, common_prefix
from .coordination import CostModel
from .eviction import EvictionQueue, depth_factor, retention_priority
from .memory import PagePool

# Later uses count from this much of the priority at which entries are being evicted. 1 forgets old popularity fastest
# and was the best for conversations, 0 never does and was the best for shared articles (`bench/context_cache.py`).
AGING = 0.98


@dataclass
class CacheStats:
    """Counters since the engine was made. Token-layers are tokens times layers."""

    lookups: int = 0
    hits: int = 0
    looked_up_token_layers: int = 0
    computed_token_layers: int = 0  # of those looked up: what passed a layer, or its mixer alone
    replayed_token_layers: int = 0  # of those computed: below the end of the matched prefix
    repeated_token_layers: int = 0  # what passed a layer once more, for the layers above
    cached_tokens: int = 0
    evictions: Counter[str] = field(default_factory=Counter)  # by kind

    def count(self, lowest: np.ndarray, num_tokens: int, matched: int, passed: int, hit: bool) -> None:
        """One prompt.

        lowest: int64 [num_layers], the first row that passed each layer.  matched: tokens found in the tree.
        passed: rows that passed a layer, each time counted.  hit: whether any layer started from the cache.
        """
        looked_up, saved = num_tokens * len(lowest), int(lowest.sum())
        self.lookups += 1
        self.hits += hit
        self.looked_up_token_layers += looked_up
        self.computed_token_layers += looked_up - saved
        self.replayed_token_layers += int(np.maximum(matched - lowest, 0).sum())
        self.repeated_token_layers += passed - (looked_up - saved)
        self.cached_tokens += int(lowest.min())

    def as_dict(self) -> dict[str, object]:
        looked_up = self.looked_up_token_layers
        saved = looked_up - self.computed_token_layers
        return {
            "cache_lookups": self.lookups,
            "cache_hits": self.hits,
            "cache_looked_up_token_layers": looked_up,
            "cache_saved_token_layers": saved,
            "cache_replayed_token_layers": self.replayed_token_layers,
            "cache_repeated_token_layers": self.repeated_token_layers,
            "cached_tokens": self.cached_tokens,
            "cache_hit_rate": saved / looked_up if looked_up else None,
            "cache_evictions": dict(self.evictions),
        }


class ContextCache:
    """The two-level tree, its entries and their eviction.

    mode: "hybrid" reuses each layer by itself; "conventional" (for comparison) reuses a prefix only where every layer
    of one layout can start from it, keeps no HIDDEN and evicts whole contexts, least recently used first.
    keep: "auto" keeps KV, STATE and HIDDEN while there is room and lets Eq. 5 decide what goes; "paper" keeps HIDDEN
    and STATE and rebuilds KV.  eviction: "value" by Eq. 5, "lru" by the last access; conventional is always the latter.
    capacity_pages: at most so many pages.
    """

    def __init__(
        self,
        pool: PagePool,
        cost_model: CostModel,
        mode: Literal["hybrid", "conventional"],
        keep: Literal["auto", "paper"],
        eviction: Literal["value", "lru"],
        capacity_pages: int,
        poison: bool = False,
    ) -> None:
        self.pool, self.mode, self.keep, self.poison = pool, mode, keep, poison
        self.by_value = eviction == "value" and mode == "hybrid"
        self.capacity_pages = capacity_pages
        self.num_layers = cost_model.config.num_hidden_layers
        self.inflation = 0.0  # the priority at which entries are being evicted
        self.matches, self.extensions = 1, 1  # lookups that found a prefix, and those that found all of an earlier one
        self.partings = np.ones(self.num_layers + 1)  # by depth, lookups whose layout left the known ones there
        self.hidden_tokens = 0 if mode == "conventional" else pool.layout.hidden_tokens
        self.root = ContextNode(np.empty(0, dtype=np.int32), 0, None)
        self.stats = CacheStats()
        self.clock = 0
        self.splits = 0  # nodes cut so far: what walks along nodes has to look again when it changes
        self._mixer_us = {route: cost_model.predict_us(route, 256, 256) / 256 for route in (ATTENTION, SSM)}
        self._rest_us = [cost_model.rest_us(layer_idx, 256) / 256 for layer_idx in range(self.num_layers)]
        self._refs = np.zeros(pool.num_pages, dtype=np.int32)
        self._queue: EvictionQueue[Entry] = EvictionQueue(self._priority)
        self._captures: dict[Captures, None] = {}  # by age

    def layer_us(self, layer_idx: int, route: int) -> float:
        """Microseconds of a prefilled token in a layer, behind some hundreds of others: what R of Eq. 5 counts in."""
        return self._mixer_us[route] + self._rest_us[layer_idx]

    # --- looking up -----------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray) -> tuple[ContextNode, int]:
        """The longest prefix of tokens in the tree: the node its last token lies in and its length.

        The node is cut there, so that it ends with the prefix.
        """
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[length:])
            if shared < len(child.tokens):
                return self._split(child, shared), length + shared
            node, length = child, length + shared
        return node, length

    def pin(self, node: ContextNode) -> None:
        """Protect the entries of a node and of those above it, until `unpin`."""
        for part in node.path():
            part.pins += 1

    def unpin(self, node: ContextNode) -> None:
        """Protect the entries of a node and of those above it no longer."""
        for part in node.path():
            assert part.pins > 0, "unpinned more often than pinned"
            part.pins -= 1
        self._remove_if_empty(node)
        self.trim()

    def touch(self, entries: Iterable[Entry], clock: int) -> None:
        """Count an access by the request that looked up at `clock`: it consumes the entries or has computed them again.

        A request counts once.
        """
        for entry in entries:
            if entry.use.used_at < clock:
                entry.use.count(clock, self.inflation)
                self._queue.push(entry)

    def count_parting(self, node: ContextNode, routes: Sequence[int]) -> None:
        """Learn at which layer layouts part: where a request's routes leave those known for its prefix."""
        here: RouteNode | None = node.root
        depth = 0
        for route in routes:
            here = None if here is None else here.children.get(route)
            if here is None:
                break
            depth += 1
        self.partings[depth] += 1

    def parting_share(self, layer_idx: int) -> float:
        """The share of requests with a known prefix whose layouts part from the known ones at a layer."""
        return float(self.partings[layer_idx] / self.partings.sum())

    # --- storing --------------------------------------------------------------------------------------------------

    def insert(self, tokens: np.ndarray) -> ContextNode:
        """The node that ends with tokens, made where it is missing; `publish` gives it entries."""
        node, length = self.match(tokens)
        if length < len(tokens):
            node.children[int(tokens[length])] = ContextNode(tokens[length:].copy(), length, node)
            node = node.children[int(tokens[length])]
        return node

    def acquire(self, kind: Kind, layer_idx: int, num_pages: int, saved_us: float) -> np.ndarray | None:
        """Spare pages for an entry that is being made, or None where all that is kept is worth more.

        saved_us: what the entry will save, R of Eq. 5.
        """
        if num_pages > self.capacity_pages:
            return None
        depth, num_bytes = depth_factor(layer_idx, self.num_layers), num_pages * self.pool.layout.page_bytes
        worth = self.inflation + retention_priority(1.0, saved_us, depth, num_bytes) if self.by_value else math.inf
        while self.pool.available < num_pages or self.num_pages + num_pages > self.capacity_pages:
            if not self._evict_one(below=worth):
                return None
        pages = np.array(self.pool.allocate(num_pages), dtype=np.int32)
        self._refs[pages] += 1
        return pages

    def register(self, captures: Captures) -> None:
        """Let a prefill's captures count as the cache's."""
        self._captures[captures] = None

    def discard(self, captures: Captures) -> None:
        """Give back what a prefill has captured; it captures nothing more."""
        self._captures.pop(captures, None)
        self._release(np.array(captures.pages(), dtype=np.int32))
        captures.hidden.clear()
        captures.states.clear()
        captures.closed = True

    def publish(
        self,
        node: ContextNode,
        routes: Sequence[int],
        kv_pages: np.ndarray,
        gate_rows: dict[int, Tensor],
        captures: Captures,
        clock: int,
        matched: int,
    ) -> None:
        """Store what a request that looked up at `clock` has computed for all tokens up to the end of `node`.

        It had found a prefix of `matched` tokens.

        routes: of all layers.  kv_pages: int32 [num_layers, columns], the request's page tables.  gate_rows: by layer,
        rows of the whole prefix.  captures: the cache becomes a further owner of what the tree lacks.
        """
        for part in node.path():
            self._publish_part(part, routes, kv_pages, gate_rows, captures, clock, matched)
        self.trim()
        self._remove_if_empty(node)

    def _publish_part(
        self,
        part: ContextNode,
        routes: Sequence[int],
        kv_pages: np.ndarray,
        gate_rows: dict[int, Tensor],
        captures: Captures,
        clock: int,
        matched: int,
    ) -> None:
        here, known, on_path = part.root, [], [part.root]
        for layer_idx, route in enumerate(routes):
            if layer_idx in gate_rows and here.gate is None:
                here.gate = gate_rows[layer_idx][part.start : part.end].clone()
            captured = captures.hidden.get(layer_idx)
            if captured is not None and here.hidden is None and captured[0] <= part.start and part.end <= captured[1]:
                first = captured[0] // self.hidden_tokens
                columns = self._columns(Kind.HIDDEN, part.start, part.end)
                pages = captured[2][columns.start - first : columns.stop - first]
                here.hidden = self._add(Kind.HIDDEN, part, here, part.start, part.end, pages)
            here = here.children.setdefault(route, RouteNode(part, here, route))
            on_path.append(here)
            if route == ATTENTION:
                if here.kv is None and self.keep == "auto":
                    pages = kv_pages[layer_idx, self._columns(Kind.KV, part.start, part.end)]
                    here.kv = self._add(Kind.KV, part, here, part.start, part.end, pages)
                elif here.kv is not None:
                    known.append(here.kv)
                continue
            if part.end in here.states and part.end == matched:
                known.append(here.states[part.end])
            for position, pages in captures.states.get(layer_idx, {}).items():
                if part.start < position <= part.end and position not in here.states:
                    here.states[position] = self._add(Kind.STATE, part, here, part.start, position, pages)
        self.touch(known, clock)
        here.prune()
        above = part.parent.root if part.parent is not None else None
        for passed in on_path:  # new ones are as hot as what they continue, as far as prefixes are continued at all
            if above is not None and passed.parent is not None:
                above = above.children.get(passed.route)
            if passed.use.heat == NEVER and above is not None:
                passed.use.heat = above.use.heat + math.log2(self.extensions / self.matches)
        for passed in reversed(on_path):
            passed.use.count(clock, self.inflation)
            passed.update_goal(self.num_layers)
        for passed in on_path:
            for entry in passed.entries():
                self._queue.push(entry)

    def _add(self, kind: Kind, node: ContextNode, routes: RouteNode, start: int, end: int, pages: np.ndarray) -> Entry:
        """A new entry that becomes a further owner of its pages."""
        assert (pages >= 0).all(), "an entry without its pages"
        self.pool.share([int(page) for page in pages])
        self._refs[pages] += 1
        use = Use()
        use.count(self.clock, self.inflation)
        entry = Entry(kind, node, routes, start, end, pages.copy(), use)
        self._queue.push(entry)
        return entry

    def _columns(self, kind: Kind, start: int, end: int) -> slice:
        """Page columns that hold the rows [start, end)."""
        rows = self.pool.layout.page_tokens if kind is Kind.KV else self.hidden_tokens
        return slice(start // rows, (end - 1) // rows + 1)

    def _split(self, node: ContextNode, length: int) -> ContextNode:
        """Cut a node after `length` tokens. Returns the new upper part; the lower keeps the node's identity."""
        assert node.parent is not None, "the root has no tokens"
        self.splits += 1
        upper = ContextNode(node.tokens[:length], node.start, node.parent, pins=node.pins)
        node.parent.children[int(node.tokens[0])] = upper
        cut = node.start + length
        self._split_routes(upper, upper.root, node.root, cut)
        node.tokens, node.start, node.parent = node.tokens[length:], cut, upper
        upper.children[int(node.tokens[0])] = node
        for part in (upper, node):
            for here in reversed(list(part.root.subtree())):
                here.prune()
        self._remove_if_empty(node)
        for part in (upper, node):
            for here in reversed(list(part.root.subtree())):
                here.update_goal(self.num_layers)
                for entry in here.entries():
                    entry.start = max(entry.start, part.start)
                    self._queue.push(entry)
        return upper

    def _split_routes(self, upper: ContextNode, target: RouteNode, source: RouteNode, cut: int) -> None:
        start, target.use = upper.start, dataclasses.replace(source.use)
        if source.gate is not None:
            target.gate, source.gate = source.gate[: cut - start].clone(), source.gate[cut - start :].clone()
        if source.hidden is not None:
            target.hidden = self._split_span(source.hidden, upper, target, cut)
        if source.kv is not None:
            target.kv = self._split_span(source.kv, upper, target, cut)
        for position in [p for p in source.states if p <= cut]:
            entry = source.states.pop(position)
            entry.node, entry.routes = upper, target
            target.states[position] = entry
        for route, child in source.children.items():
            target.children[route] = RouteNode(upper, target, route)
            self._split_routes(upper, target.children[route], child, cut)

    def _split_span(self, entry: Entry, upper: ContextNode, routes: RouteNode, cut: int) -> Entry:
        """The rows before `cut` as an entry of their own; a page that holds rows of both gets a further owner."""
        columns = self._columns(entry.kind, entry.start, cut)
        first = self._columns(entry.kind, cut, entry.end).start - columns.start
        head = entry.pages[: columns.stop - columns.start]
        both = head[first:]
        self.pool.share([int(page) for page in both])
        self._refs[both] += 1
        made = Entry(entry.kind, upper, routes, entry.start, cut, head.copy(), dataclasses.replace(entry.use))
        entry.pages, entry.start = entry.pages[first:].copy(), cut
        self._queue.push(made)
        return made

    # --- making room ----------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that the cache is an owner of."""
        return int(np.count_nonzero(self._refs))

    def owned(self) -> list[int]:
        """Every page the cache owns, as often as it does."""
        return np.repeat(np.arange(len(self._refs)), self._refs).tolist()

    def check_integrity(self) -> None:
        """Assert that the pages the cache counts are those of its entries and captures, and that the tree is whole."""
        counted = np.zeros_like(self._refs)
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            for child in node.children.values():
                assert child.parent is node and child.start == node.end, "a context node out of place"
            assert node is self.root or node.children or node.pins or node.root.children, "an empty context node"
            for here in node.root.subtree():
                empty = not here.children and next(here.entries(), None) is None
                assert here is node.root or not empty, "a route node that holds nothing"
                for entry in here.entries():
                    assert entry.node is node and entry.routes is here, "an entry out of place"
                    assert node.start <= entry.start < entry.end <= node.end, "an entry outside its node"
                    np.add.at(counted, entry.pages, 1)
        for captures in self._captures:
            np.add.at(counted, np.array(captures.pages(), dtype=np.int32), 1)
        assert (counted == self._refs).all(), "the cache counts pages that it does not hold"

    def reclaim(self, num_pages: int) -> bool:
        """Evict until so many pages are available; False where even an empty cache would not give them.

        Captures of running prefills go last; they delay nobody.
        """
        if self.pool.available >= num_pages:
            return True
        idle = int(((self._refs > 0) & (self._refs == self.pool.ref_counts)).sum())
        if self.pool.available + idle < num_pages:
            return False
        while self.pool.available < num_pages:
            if not self._evict_one():
                if not self._captures:
                    return False
                self.discard(next(reversed(self._captures)))
        return True

    def trim(self) -> None:
        """Evict down to the capacity."""
        while self.num_pages > self.capacity_pages and self._evict_one():
            pass

    def clear(self) -> None:
        """Drop every entry that no prefill counts on."""
        while self._evict_one():
            pass

    def _evict_one(self, below: float = float("inf")) -> bool:
        """Drop the entry of the lowest priority, or in conventional mode its whole context.

        False where none may go: all are pinned, or the lowest priority is not below the one given.
        """
        pinned: list[Entry] = []
        while (found := self._queue.pop()) is not None and found.node.pins:
            pinned.append(found)
        for entry in pinned:
            self._queue.push(entry)
        if found is None:
            return False
        priority = self._priority(found)
        if priority >= below:
            self._queue.push(found)
            return False
        if self.by_value:
            self.inflation = max(self.inflation, AGING * priority)
        if self.mode == "conventional":
            for entry in [e for part in found.node.root.subtree() for e in part.entries()]:
                if entry is not found and entry.use.used_at == found.use.used_at:
                    self._drop(entry)
        self._drop(found)
        self._remove_if_empty(found.node)
        return True

    def _drop(self, entry: Entry) -> None:
        self._queue.remove(entry)
        here = entry.routes
        if entry.kind is Kind.STATE:
            del here.states[entry.end]
        elif entry.kind is Kind.KV:
            here.kv = None
        else:
            here.hidden = None
        self._release(entry.pages)
        self.stats.evictions[entry.kind.value] += 1
        here = here.prune()
        here.update_goal(self.num_layers)
        # whatever it was a step for is worth less now
        for node in (*here.above(), *here.subtree()):
            for other in node.entries():
                self._queue.push(other)

    def _remove_if_empty(self, node: ContextNode) -> None:
        """A node without entries goes unless prefixes below or running prefills need it; so do those above it."""
        while node.parent is not None and not (node.children or node.pins or node.root.children):
            if node.parent.children.get(int(node.tokens[0])) is not node:
                return  # gone already
            del node.parent.children[int(node.tokens[0])]
            node = node.parent

    def _release(self, pages: np.ndarray) -> None:
        np.subtract.at(self._refs, pages, 1)
        self.pool.release([int(page) for page in pages], poison=self.poison)

    def _priority(self, entry: Entry) -> float:
        """Eq. 5, counted from `base`, or the clock of the last access where the least recently used goes first.

        What a layer starts from is of use only together with the layers below and up to the rows it leads to: they
        save together and take room together, and have one priority. Rows (HIDDEN) are counted by themselves.
        """
        if not self.by_value:
            return float(entry.use.used_at)
        depth, node, tokens = depth_factor(entry.layer_idx, self.num_layers), entry.routes, entry.end - entry.start
        use: Use | Goal = entry.use
        pages = len(entry.pages)
        if entry.kind is Kind.HIDDEN:
            saved_us = tokens * self._path_us(node, None)
        elif entry.kind is Kind.STATE and entry.end < max(node.states, default=0):
            # a shorter way for a prefix that ends behind it, where the longest is not of use
            below = max((p for p in node.states if p < entry.end), default=entry.start)
            saved_us = (entry.end - below) // 4 * self.layer_us(entry.layer_idx, SSM)
        elif node.goal is None:
            saved_us = 0.0
        else:
            if entry.kind is Kind.STATE:
                tokens = entry.end - self._last_state(entry)
            saved_us = tokens * self._path_us(node, node.goal)
            use, pages = node.goal, pages + node.goal.pages
            below_node = node.parent
            while below_node is not None and below_node.hidden is None:
                pages += below_node.edge_pages or 0
                below_node = below_node.parent
        num_bytes = pages * self.pool.layout.page_bytes
        # of two equal ones the later tokens go first: the earlier ones are of no less use
        return use.base + retention_priority(use.hits, saved_us, depth, num_bytes) * (1 - 1e-6 * entry.start)

    def _last_state(self, entry: Entry) -> int:
        """Tokens of the nearest state of the same layer and routes before an entry, on the nodes above it."""
        shorter = reversed(entry.node.path()[:-1])
        return next((max(here.states) for here in entry.routes.counterparts(shorter) if here.states), 0)

    def _path_us(self, node: RouteNode, goal: Goal | None) -> float:
        """Microseconds per token that reuse saves by going on to a node, and to its goal, not stopping before.

        Before: at the nearest rows below, or behind the nearest layer that has nothing to start from.
        """
        us, below = 0.0, node
        while below.parent is not None and below.edge_pages is not None:
            us += self.layer_us(below.depth - 1, below.route)
            below = below.parent
            if below.hidden is not None:
                break
        if goal is not None:
            us += goal.attention * (self._mixer_us[ATTENTION] - self._mixer_us[SSM])
            us += sum(self.layer_us(i, SSM) for i in range(node.depth, goal.depth))
        return us
