"""The context cache: an outer radix tree over tokens, an inner trie over routes, entries per layer (§6.1).

A prefix that has been computed leaves behind, per layer, what the next request with the same tokens can start from:
KV rows or an SSM state on the edge of the layer's route, and the rows that enter a layer (HIDDEN) with their gate rows
on the node before it. What an entry holds depends on the tokens and on the routes of the layers below, and on nothing
else, so both are its key.

Entries live in pages of the engine's pool that nobody else wants: a request that needs pages gets them first.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from ..kernels import ATTENTION
from .cache_stats import CacheStats
from .cache_tree import Captures, ContextNode, Entry, Kind, RouteNode, Use, common_prefix
from .coordination import CostModel
from .eviction import EvictionQueue, hits_at
from .memory import PagePool
from .retention import Retention

FORGOTTEN = 1 / 32  # hits below which routes without entries are not remembered


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
        self.num_pages = 0  # that the cache is an owner of
        self.hidden_tokens = 0 if mode == "conventional" else pool.layout.hidden_tokens
        self.root = ContextNode(np.empty(0, dtype=np.int32), 0, None)
        self.retention = Retention(cost_model, pool.layout.page_bytes, self.root.root.counts)
        self.stats = CacheStats()
        self.clock = 0
        self.splits = 0  # nodes cut so far: what walks along nodes has to look again when it changes
        self._refs = np.zeros(pool.num_pages, dtype=np.int32)
        self._queue: EvictionQueue[Entry] = EvictionQueue(self._priority)
        self._parked: dict[ContextNode, dict[Entry, None]] = {}  # pinned ones whose turn to be evicted has come
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
            if not part.pins:
                for entry in self._parked.pop(part, ()):
                    self._queue.push(entry)
        self._remove_if_empty(node)
        self.trim()

    def touch(self, entries: Iterable[Entry], clock: int) -> None:
        """Count an access by the request that looked up at `clock`: it consumes the entries or has computed them again.

        A request counts once.
        """
        for entry in entries:
            if entry.use.used_at < clock:
                entry.use.count(clock)

    # --- storing --------------------------------------------------------------------------------------------------

    def insert(self, tokens: np.ndarray) -> ContextNode:
        """The node that ends with tokens, made where it is missing; `publish` gives it entries."""
        node, length = self.match(tokens)
        if length < len(tokens):
            node.children[int(tokens[length])] = ContextNode(tokens[length:].copy(), length, node)
            node = node.children[int(tokens[length])]
        return node

    def acquire(self, layer_idx: int, num_pages: int, saved_us: float) -> np.ndarray | None:
        """Spare pages for an entry that is being made, or None where all that is kept is worth more.

        saved_us: what the entry is expected to save, in microseconds per lookup of the cache: H * R of Eq. 5.
        """
        if num_pages > self.capacity_pages:
            return None
        worth: float | None = None
        while self.pool.available < num_pages or self.num_pages + num_pages > self.capacity_pages:
            if worth is None:
                worth = self.retention.worth_of_new(layer_idx, num_pages, saved_us) if self.by_value else math.inf
            if not self._evict_one(below=worth):
                return None
        pages = np.array(self.pool.allocate(num_pages), dtype=np.int32)
        self._refs[pages] = 1
        self.num_pages += num_pages
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
        answer: bool = False,
    ) -> None:
        """Store what a request that looked up at `clock` has computed for all tokens up to the end of `node`.

        It had found a prefix of `matched` tokens. answer: it has left its prompt here before, which counts once.

        routes: of all layers.  kv_pages: int32 [num_layers, columns], the request's page tables.  gate_rows: by layer,
        rows of the whole prefix.  captures: the cache becomes a further owner of what the tree lacks.

        It may hold more than its capacity until `trim`, which `unpin` calls.
        """
        path, leaf = node.path(), node.root
        for route in routes:
            leaf = leaf.child(route)
        if not answer:
            text = next((part.root for part in path[:-1] if part.end == matched), None)
            self.retention.learn(leaf, text, routes, clock)
        counts = [not answer or part.root.use.since < 0 for part in path]
        if self.by_value:
            self.retention.rates.use(list(itertools.compress(path, counts)), clock)
        for part, counted in zip(path, counts, strict=True):
            on_path = self._publish_part(part, routes, kv_pages, gate_rows, captures, clock, matched)
            if counted:
                self._count_use(on_path, clock)
            for here in reversed(on_path):
                self.retention.refresh_node(here)
        if self.by_value:
            self._requeue(here for part in self.retention.rates.silent() for here in part.root.subtree())
        else:
            self.trim()  # in the order of access this prefix comes last, which holds while it is pinned
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
    ) -> list[RouteNode]:
        """Returns the nodes of the routes, from the root on."""
        here, known, made, on_path = part.root, [], [], [part.root]
        for layer_idx, route in enumerate(routes):
            captured = captures.hidden.get(layer_idx)
            if captured is not None and here.hidden is None and captured[0] <= part.start and part.end <= captured[1]:
                first = captured[0] // self.hidden_tokens
                columns = self._columns(Kind.HIDDEN, part.start, part.end)
                pages = captured[2][columns.start - first : columns.stop - first]
                here.hidden = self._add(Kind.HIDDEN, here, part.start, part.end, pages)
                made.append(here.hidden)
            here = here.child(route)
            on_path.append(here)
            if route == ATTENTION:
                if here.kv is None and self.keep == "auto":
                    pages = kv_pages[layer_idx, self._columns(Kind.KV, part.start, part.end)]
                    here.kv = self._add(Kind.KV, here, part.start, part.end, pages)
                    made.append(here.kv)
                elif here.kv is not None:
                    known.append(here.kv)
                continue
            if part.end in here.states and part.end == matched:
                known.append(here.states[part.end])
            for position, pages in captures.states.get(layer_idx, {}).items():
                if part.start < position <= part.end and position not in here.states:
                    here.states[position] = self._add(Kind.STATE, here, part.start, position, pages)
                    made.append(here.states[position])
        if made:
            pages = np.concatenate([entry.pages for entry in made])
            assert (pages >= 0).all(), "an entry without its pages"
            self.pool.share(pages)
            self._count_owned(pages)
        self.touch(known, clock)
        for layer_idx, rows in gate_rows.items():
            here = on_path[layer_idx]
            if here.num_entries and here.gate is None:
                here.gate = rows[part.start : part.end].clone()
        for entry in made:
            self._queue.add(entry)
        return on_path

    def _count_use(self, on_path: list[RouteNode], clock: int) -> None:
        """A request with the tokens of a context node took the routes of `on_path`, from the root on."""
        for node in on_path:
            node.use.count(clock)
            for other in list(node.children.values()):
                if not other.num_entries and hits_at(other.use.heat, clock) < FORGOTTEN:
                    del node.children[other.route]

    def _add(self, kind: Kind, node: RouteNode, start: int, end: int, pages: np.ndarray) -> Entry:
        """A new entry of a node, not queued yet, that has not become an owner of its pages yet."""
        use = Use()
        use.count(self.clock)
        node.count_entries(1)
        return Entry(kind, node.context, node, start, end, pages.copy(), use)

    def _requeue(self, nodes: Iterable[RouteNode]) -> None:
        """Entries of nodes that may be worth less now get their place anew."""
        for node in nodes:
            for entry in node.entries():
                self._queue.push(entry)

    def _columns(self, kind: Kind, start: int, end: int) -> slice:
        """Page columns that hold the rows [start, end)."""
        rows = self.pool.layout.page_tokens if kind is Kind.KV else self.hidden_tokens
        return slice(start // rows, (end - 1) // rows + 1)

    def _split(self, node: ContextNode, length: int) -> ContextNode:
        """Cut a node after `length` tokens. Returns the new upper part; the lower keeps the node's identity."""
        assert node.parent is not None, "the root has no tokens"
        self.splits += 1
        self._parked.pop(node, None)  # all its entries are queued anew below
        upper = ContextNode(node.tokens[:length], node.start, node.parent, pins=node.pins)
        node.parent.children[int(node.tokens[0])] = upper
        cut = node.start + length
        self._split_routes(upper, upper.root, node.root, cut)
        node.tokens, node.start, node.parent = node.tokens[length:], cut, upper
        upper.children[int(node.tokens[0])] = node
        self._remove_if_empty(node)
        if self.by_value:
            self.retention.rates.watch_cut(upper)
        for part in (upper, node):
            for here in reversed(list(part.root.subtree())):
                self.retention.refresh(here)
                if not here.num_entries:
                    here.gate = None
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
            source.count_entries(-1)
            target.count_entries(1)
            target.states[position] = entry
        for route, child in source.children.items():
            self._split_routes(upper, target.child(route), child, cut)

    def _split_span(self, entry: Entry, upper: ContextNode, routes: RouteNode, cut: int) -> Entry:
        """The rows before `cut` as an entry of their own; a page that holds rows of both gets a further owner."""
        columns = self._columns(entry.kind, entry.start, cut)
        first = self._columns(entry.kind, cut, entry.end).start - columns.start
        head = entry.pages[: columns.stop - columns.start]
        both = head[first:]
        self.pool.share(both)
        self._count_owned(both)
        routes.count_entries(1)
        made = Entry(entry.kind, upper, routes, entry.start, cut, head.copy(), dataclasses.replace(entry.use))
        entry.pages, entry.start = entry.pages[first:].copy(), cut
        self._queue.push(made)
        return made

    # --- making room ----------------------------------------------------------------------------------------------

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
            assert node is self.root or node.children or node.pins or node.root.num_entries, "an empty context node"
            for here in node.root.subtree():
                held = sum(below.num_entries for below in here.children.values()) + sum(1 for _ in here.entries())
                assert here.num_entries == held, "entries that are not counted"
                assert held or here.gate is None, "gate rows that nobody can use"
                for entry in here.entries():
                    assert entry.node is node and entry.routes is here, "an entry out of place"
                    assert node.start <= entry.start < entry.end <= node.end, "an entry outside its node"
                    np.add.at(counted, entry.pages, 1)
        for captures in self._captures:
            np.add.at(counted, np.array(captures.pages(), dtype=np.int32), 1)
        assert (counted == self._refs).all(), "the cache counts pages that it does not hold"
        assert self.num_pages == np.count_nonzero(counted), "pages that are not counted"

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
        self.retention.rates.forget_watched()
        while self._evict_one():
            pass

    def _evict_one(self, below: float = float("inf")) -> bool:
        """Drop the entry of the lowest priority, or in conventional mode its whole context.

        False where none may go: all are pinned, or the lowest priority is not below the one given.
        """
        while (lowest := self._queue.pop()) is not None and lowest[0].node.pins:
            self._parked.setdefault(lowest[0].node, {})[lowest[0]] = None
        if lowest is None:
            return False
        found, priority = lowest
        if priority >= below:
            self._queue.push(found)
            return False
        if self.mode == "conventional":
            for entry in [e for part in found.node.root.subtree() for e in part.entries()]:
                if entry is not found and entry.use.used_at == found.use.used_at:
                    self._drop(entry)
        self._drop(found)
        self._remove_if_empty(found.node)
        return True

    def _drop(self, entry: Entry) -> None:
        self._queue.remove(entry)
        self._parked.get(entry.node, {}).pop(entry, None)
        here = entry.routes
        if entry.kind is Kind.STATE:
            del here.states[entry.end]
        elif entry.kind is Kind.KV:
            here.kv = None
        else:
            here.hidden = None
        self._release(entry.pages)
        self.stats.evictions[entry.kind.value] += 1
        here.count_entries(-1)
        if self.by_value:
            # whatever it was a step for is worth less now
            self._requeue(self.retention.refresh(here))
            self._requeue(here.to_rows())

    def _remove_if_empty(self, node: ContextNode) -> None:
        """A node without entries goes unless prefixes below or running prefills need it; so do those above it."""
        while node.parent is not None and not (node.children or node.pins or node.root.num_entries):
            if node.parent.children.get(int(node.tokens[0])) is not node:
                return  # gone already
            del node.parent.children[int(node.tokens[0])]
            node = node.parent

    def _count_owned(self, pages: np.ndarray) -> None:
        """The cache is an owner of some different pages, or once more."""
        self.num_pages += int(np.count_nonzero(self._refs[pages] == 0))
        self._refs[pages] += 1

    def _release(self, pages: np.ndarray) -> None:
        """The opposite, for each page once."""
        self._refs[pages] -= 1
        self.num_pages -= int(np.count_nonzero(self._refs[pages] == 0))
        self.pool.release(pages, poison=self.poison)

    def _priority(self, entry: Entry) -> float:
        """Eq. 5, or the clock of the last access where the least recently used goes first."""
        return self.retention.priority(entry) if self.by_value else float(entry.use.used_at)
