"""The context cache: an outer radix tree over tokens, an inner trie over routes, entries per layer (§6.1).

A prefix that has been computed leaves behind, per layer, what the next request with the same tokens can start from:
KV rows or an SSM state on the edge of the layer's route, and the rows that enter a layer (HIDDEN) with their gate rows
on the node before it. What an entry holds depends on the tokens and on the routes of the layers below, and on nothing
else, so both are its key.

Entries live in pages of the engine's pool that nobody else wants: a request that needs pages gets them first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from torch import Tensor

from ..kernels import ATTENTION, SSM
from .coordination import CostModel
from .eviction import EvictionQueue, depth_factor, heat_after_access, log_priority
from .memory import PagePool


class Kind(Enum):
    """What an entry holds."""

    KV = "kv"  # keys and values of the node's tokens in one attention layer
    STATE = "state"  # SSM state and conv window of one layer after exactly `end` tokens
    HIDDEN = "hidden"  # the rows of the node's tokens that enter a layer


class RouteNode:
    """A node of the inner trie: the layers below have taken the routes on the way here.

    depth: layers passed.  hidden: rows that enter layer `depth`.  gate: [span, gate_dim] fp32, their gate rows; they
    lie beside the pool (64 bytes per token and layer) and go with the node.  kv, states: what the layer before,
    `depth - 1`, left, states by token count.
    """

    __slots__ = ("children", "depth", "gate", "hidden", "kv", "parent", "route", "states")

    def __init__(self, parent: "RouteNode | None" = None, route: int = -1) -> None:
        self.parent, self.route = parent, route
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, RouteNode] = {}
        self.gate: Tensor | None = None
        self.hidden: Entry | None = None
        self.kv: Entry | None = None
        self.states: dict[int, Entry] = {}

    def descend(self, routes: Sequence[int]) -> "RouteNode | None":
        """The node that further routes lead to, if it is there."""
        node: RouteNode | None = self
        for route in routes:
            if node is None:
                return None
            node = node.children.get(route)
        return node

    def entries(self) -> "Iterator[Entry]":
        """Entries of this node alone."""
        yield from (entry for entry in (self.hidden, self.kv) if entry is not None)
        yield from list(self.states.values())

    def subtree(self) -> "Iterator[RouteNode]":
        """This node and all below it."""
        yield self
        for child in list(self.children.values()):
            yield from child.subtree()


@dataclass(eq=False)
class ContextNode:
    """A node of the outer tree: the tokens [start, start + len(tokens)) of every prefix that passes through it.

    pins: prefills that count on its entries, or on those of a node below.
    """

    tokens: np.ndarray
    start: int
    parent: "ContextNode | None"
    children: "dict[int, ContextNode]" = field(default_factory=dict)
    root: RouteNode = field(default_factory=RouteNode)
    pins: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> "list[ContextNode]":
        """The nodes from the first tokens to this one, without the empty root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False)
class Entry:
    """Something kept in pages. start, end: its tokens; a STATE stands after `end` tokens.

    pages: those of KV or HIDDEN cover whole pages by absolute position, so the first may begin before `start`; those
    of a STATE are the state's, then its conv window's.  heat: log2 of H in Eq. 5, see `heat_after_access`.
    used_at: clock of the last access.
    """

    kind: Kind
    node: ContextNode
    routes: RouteNode
    start: int
    end: int
    pages: np.ndarray
    heat: float
    used_at: int

    @property
    def layer_idx(self) -> int:
        """The layer it saves work in."""
        return self.routes.depth - (self.kind is not Kind.HIDDEN)


@dataclass(eq=False)
class Captures:
    """Pages that a prefill fills for the cache while it runs; the cache owns them, and may take them back.

    hidden: layer -> (first row, pages from the one that holds it).  states: layer -> token count -> pages.
    closed: nothing more is captured.
    """

    hidden: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    states: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    closed: bool = False

    def pages(self) -> list[int]:
        """All pages held."""
        arrays = [pages for _, pages in self.hidden.values()]
        arrays += [pages for at_layer in self.states.values() for pages in at_layer.values()]
        return [int(page) for pages in arrays for page in pages]


@dataclass
class CacheStats:
    """Counters since the engine was made. Token-layers are tokens times layers."""

    lookups: int = 0
    hits: int = 0
    looked_up_token_layers: int = 0
    computed_token_layers: int = 0  # of those looked up: all rows that passed a layer, or its mixer alone
    replayed_token_layers: int = 0  # part of the computed ones: rows below the matched prefix's end
    cached_tokens: int = 0
    evictions: Counter[str] = field(default_factory=Counter)  # by kind

    def as_dict(self) -> dict[str, object]:
        looked_up = self.looked_up_token_layers
        saved = looked_up - self.computed_token_layers
        return {
            "cache_lookups": self.lookups,
            "cache_hits": self.hits,
            "cache_looked_up_token_layers": looked_up,
            "cache_saved_token_layers": saved,
            "cache_replayed_token_layers": self.replayed_token_layers,
            "cached_tokens": self.cached_tokens,
            "cache_hit_rate": saved / looked_up if looked_up else None,
            "cache_evictions": dict(self.evictions),
        }


class ContextCache:
    """The two-level tree, its entries and their eviction.

    mode: "hybrid" reuses each layer by itself; "conventional" (for comparison) reuses a prefix only where every layer
    of one layout can start from it, keeps no HIDDEN and evicts whole contexts, least recently used first.
    keep: "auto" keeps KV, STATE and HIDDEN while there is room and lets Eq. 5 decide what goes; "paper" keeps HIDDEN
    and STATE and rebuilds KV.  capacity_pages: at most so many pages.  token_us: per layer and route, microseconds
    of one token, split into the mixer and the rest of the layer.
    """

    def __init__(
        self,
        pool: PagePool,
        cost_model: CostModel,
        mode: Literal["hybrid", "conventional"],
        keep: Literal["auto", "paper"],
        capacity_pages: int,
        poison: bool = False,
    ) -> None:
        self.pool, self.mode, self.keep, self.poison = pool, mode, keep, poison
        self.capacity_pages = capacity_pages
        self.num_layers = cost_model.config.num_hidden_layers
        self.hidden_tokens = 0 if mode == "conventional" else pool.layout.hidden_tokens
        self.root = ContextNode(np.empty(0, dtype=np.int32), 0, None)
        self.stats = CacheStats()
        self.clock = 0
        self.splits = 0  # nodes cut so far: what walks along nodes has to look again when it changes
        self.mixer_us = {route: cost_model.predict_us(route, 256, 256) / 256 for route in (ATTENTION, SSM)}
        self.rest_us = [cost_model.rest_us(layer_idx, 256) / 256 for layer_idx in range(self.num_layers)]
        self._refs = np.zeros(pool.num_pages, dtype=np.int32)
        self._queue: EvictionQueue[Entry] = EvictionQueue(self._priority)
        self._captures: dict[Captures, None] = {}  # by age

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

    def touch(self, entries: Iterable[Entry]) -> None:
        """Count an access of entries that a request consumes."""
        self.clock += 1
        for entry in entries:
            entry.heat = heat_after_access(entry.heat, self.clock)
            entry.used_at = self.clock
            self._queue.push(entry)

    # --- storing --------------------------------------------------------------------------------------------------

    def insert(self, tokens: np.ndarray) -> ContextNode:
        """The node that ends with tokens, made where it is missing. It has no entries yet: `keep_*` add them."""
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
        heat, depth = heat_after_access(float("-inf"), self.clock), depth_factor(layer_idx, self.num_layers)
        worth = log_priority(heat, saved_us, depth, num_pages * self.pool.layout.page_bytes)
        if self.mode == "conventional":
            worth = float(self.clock)
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
    ) -> None:
        """Store what a request has computed for all tokens up to the end of `node`.

        routes: of all layers.  kv_pages: int32 [num_layers, columns], the request's page tables.  gate_rows: by layer,
        rows of the whole prefix.  captures: the cache becomes a further owner of what the tree lacks.
        """
        self.clock += 1
        path = node.path()
        for part in path:
            self._publish_part(part, routes, kv_pages, gate_rows, captures)
        self.trim()
        self._remove_if_empty(node)

    def _publish_part(
        self,
        part: ContextNode,
        routes: Sequence[int],
        kv_pages: np.ndarray,
        gate_rows: dict[int, Tensor],
        captures: Captures,
    ) -> None:
        here = part.root
        for layer_idx, route in enumerate(routes):
            if layer_idx in gate_rows and here.gate is None:
                here.gate = gate_rows[layer_idx][part.start : part.end].clone()
            captured = captures.hidden.get(layer_idx)
            if captured is not None and here.hidden is None and captured[0] <= part.start:
                first = captured[0] // self.hidden_tokens
                columns = self._columns(Kind.HIDDEN, part.start, part.end)
                pages = captured[1][columns.start - first : columns.stop - first]
                here.hidden = self._add(Kind.HIDDEN, part, here, part.start, part.end, pages)
            here = here.children.setdefault(route, RouteNode(here, route))
            if route == ATTENTION:
                if here.kv is None and self.keep == "auto":
                    pages = kv_pages[layer_idx, self._columns(Kind.KV, part.start, part.end)]
                    here.kv = self._add(Kind.KV, part, here, part.start, part.end, pages)
                continue
            for position, pages in captures.states.get(layer_idx, {}).items():
                if part.start < position <= part.end and position not in here.states:
                    here.states[position] = self._add(Kind.STATE, part, here, part.start, position, pages)

    def _add(self, kind: Kind, node: ContextNode, routes: RouteNode, start: int, end: int, pages: np.ndarray) -> Entry:
        """A new entry that becomes a further owner of its pages."""
        assert (pages >= 0).all(), "an entry without its pages"
        self.pool.share([int(page) for page in pages])
        self._refs[pages] += 1
        heat = heat_after_access(float("-inf"), self.clock)
        entry = Entry(kind, node, routes, start, end, pages.copy(), heat, self.clock)
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
        for below in node.root.subtree():
            for entry in below.entries():
                entry.start = max(entry.start, cut)
                self._queue.push(entry)
        return upper

    def _split_routes(self, upper: ContextNode, target: RouteNode, source: RouteNode, cut: int) -> None:
        start = upper.start
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
            target.children[route] = RouteNode(target, route)
            self._split_routes(upper, target.children[route], child, cut)
        if not target.children and target.parent is not None and not any(True for _ in target.entries()):
            del target.parent.children[target.route]

    def _split_span(self, entry: Entry, upper: ContextNode, routes: RouteNode, cut: int) -> Entry:
        """The rows before `cut` as an entry of their own; a page that holds rows of both gets a further owner."""
        columns = self._columns(entry.kind, entry.start, cut)
        first = self._columns(entry.kind, cut, entry.end).start - columns.start
        head = entry.pages[: columns.stop - columns.start]
        both = head[first:]
        self.pool.share([int(page) for page in both])
        self._refs[both] += 1
        made = Entry(entry.kind, upper, routes, entry.start, cut, head.copy(), entry.heat, entry.used_at)
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
        held: list[Entry] = []
        found = None
        while found is None and (entry := self._queue.pop()) is not None:
            if entry.node.pins:
                held.append(entry)
            elif self._priority(entry) >= below:
                held.append(entry)
                break
            else:
                found = entry
        for entry in held:
            self._queue.push(entry)
        if found is None:
            return False
        if self.mode == "conventional":
            for entry in [e for part in found.node.root.subtree() for e in part.entries()]:
                if entry is not found and entry.used_at == found.used_at:
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
        while here.parent is not None and not here.children and next(here.entries(), None) is None:
            del here.parent.children[here.route]
            here = here.parent
        if here.parent is None and not here.children:
            here.gate = None

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
        """log2 of Eq. 5; in conventional mode the clock of the last access, so that the oldest context goes first."""
        if self.mode == "conventional":
            return float(entry.used_at)
        depth = depth_factor(entry.layer_idx, self.num_layers)
        num_bytes = len(entry.pages) * self.pool.layout.page_bytes
        # of two equal ones the later tokens go first: the earlier ones are of no less use
        return log_priority(entry.heat, self._saved_us(entry), depth, num_bytes) - 1e-6 * entry.start

    def _saved_us(self, entry: Entry) -> float:
        """R of Eq. 5: what computing the entry again would take, given what else survives."""
        node, cost = entry.routes, 0.0
        tokens = entry.end - entry.start
        if entry.kind is Kind.STATE:
            below = [position for position in node.states if position < entry.end]
            tokens = entry.end - max(below, default=entry.start)
        if entry.kind is not Kind.HIDDEN:
            cost += self.mixer_us[node.route]
            assert node.parent is not None
            node = node.parent
        # down to the nearest rows that survive below; the embedding always does
        skip = entry if entry.kind is Kind.HIDDEN else None
        while node.depth and (node.hidden is None or node.hidden is skip):
            cost += self.mixer_us[node.route] + self.rest_us[node.depth - 1]
            assert node.parent is not None
            node = node.parent
        return cost * max(1, tokens)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements two arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
