"""The two-level tree of the context cache: prefixes of tokens outside, routes inside, entries per layer (§6.1)."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from torch import Tensor

from ..kernels import SSM
from .eviction import NEVER, heat_after_access, hits_at
from .route_counts import RouteCounts


class Kind(Enum):
    """What an entry holds."""

    KV = "kv"  # keys and values of the node's tokens in one attention layer
    STATE = "state"  # SSM state and conv window of one layer after exactly `end` tokens
    HIDDEN = "hidden"  # the rows of the node's tokens that enter a layer


@dataclass
class Use:
    """When and how often something was used.

    heat: see `heat_after_access`.  since, used_at: clock of the first and of the last time.
    """

    heat: float = NEVER
    since: int = -1
    used_at: int = -1

    def count(self, clock: int) -> None:
        """One more use; they need not be told of in order."""
        self.since = clock if self.since < 0 else min(self.since, clock)
        self.heat, self.used_at = heat_after_access(self.heat, clock), max(self.used_at, clock)

    @property
    def hits(self) -> float:
        """Decayed number of uses, as of the last one."""
        return hits_at(self.heat, self.used_at)


@dataclass(frozen=True)
class Goal:
    """How far reuse can go on: to the layer `depth`, whose rows are there or which is behind the last.

    share: of the requests with the text, those that are expected to go there.  pages: of all it takes, from the node
    that has it.
    attention: how many of the layers from that node on take attention.
    """

    share: float
    depth: int
    pages: int
    attention: int = 0

    def worth(self, depth: int) -> float:
        """Use per page for reuse that stands at a lower layer."""
        return self.share * (self.depth - depth + 0.5) / (self.pages + 1)


class RouteNode:
    """A node of the inner trie: the layers below have taken the routes on the way here.

    depth: layers passed.  hidden: rows that enter layer `depth`.  gate: [span, gate_dim] fp32, their gate rows; they
    lie beside the pool (64 bytes per token and layer) and go with the entries at and behind the node.  kv, states: what
    the layer before, `depth - 1`, left, states by token count.  num_entries: at the node and behind it.
    use: by requests with these tokens and routes, whether or not entries are left.  counts: of the same routes with any
    tokens.  goal: where reuse that has come here had best go on to, see `Goal`.  served: the share of the text's
    requests that can start at this depth or further on.  context: the outer node it belongs to.
    """

    __slots__ = (
        "children", "context", "counts", "depth", "gate", "goal", "hidden", "kv", "num_entries", "parent", "route",
        "served", "states", "use",
    )  # fmt: skip

    def __init__(self, context: "ContextNode", counts: RouteCounts, parent: "RouteNode | None" = None) -> None:
        self.context, self.counts, self.parent = context, counts, parent
        self.use = Use()
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.route = -1
        self.children: dict[int, RouteNode] = {}
        self.gate: Tensor | None = None
        self.hidden: Entry | None = None
        self.kv: Entry | None = None
        self.states: dict[int, Entry] = {}
        self.num_entries = 0
        self.goal: Goal | None = None
        self.served = 0.0

    def child(self, route: int) -> "RouteNode":
        """The node behind one more route, made where it is missing."""
        if route not in self.children:
            self.children[route] = RouteNode(self.context, self.counts.child(route), self)
            self.children[route].route = route
        return self.children[route]

    def follow(self, routes: Sequence[int]) -> "RouteNode | None":
        """The node behind some more routes, where it is."""
        node: RouteNode | None = self
        for route in routes:
            node = None if node is None else node.children.get(route)
        return node

    @property
    def edge_pages(self) -> int | None:
        """Pages of what the layer before has to start from behind all tokens of the node; None where it has nothing.

        An SSM layer needs a state at the end of a known prefix alone; inside one it is enough that a node below has it.
        """
        if self.kv is not None:
            return len(self.kv.pages)
        if self.states:
            return len(self.states[max(self.states)].pages)
        return 0 if self.route == SSM and self._state_below() else None

    def counterparts(self, contexts: "Iterable[ContextNode]") -> "Iterator[RouteNode]":
        """The nodes behind the same routes in the tries of other context nodes, where they are."""
        routes = [node.route for node in (self, *self.above()) if node.parent is not None][::-1]
        found = (context.root.follow(routes) for context in contexts)
        yield from (node for node in found if node is not None)

    def _state_below(self) -> bool:
        """Whether a longer prefix has a state of the same layer and routes, as far as a few of them tell."""
        return any(here.states for here in self.counterparts(itertools.islice(self.context.below(), 16)))

    def count_entries(self, change: int) -> None:
        """So many entries more at this node. Gate rows go where none are left."""
        for node in (self, *self.above()):
            node.num_entries += change
            if not node.num_entries:
                node.gate = None

    def entries(self) -> "Iterator[Entry]":
        """Entries of this node alone."""
        yield from (entry for entry in (self.hidden, self.kv) if entry is not None)
        yield from list(self.states.values())

    def above(self) -> "Iterator[RouteNode]":
        """The nodes on the way up, this one not among them."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def to_rows(self) -> "Iterator[RouteNode]":
        """The nodes below, on each way down to the first that has rows (HIDDEN)."""
        for child in self.children.values():
            yield child
            if child.hidden is None:
                yield from child.to_rows()

    def subtree(self) -> "Iterator[RouteNode]":
        """This node and all below it."""
        yield self
        for child in list(self.children.values()):
            yield from child.subtree()


@dataclass(eq=False)
class ContextNode:
    """A node of the outer tree: the tokens [start, start + len(tokens)) of every prefix that passes through it.

    pins: prefills that count on its entries, or on those of a node below.  rate: the last of `ReturnRates.of`, and the
    clock it is from.
    """

    tokens: np.ndarray
    start: int
    parent: "ContextNode | None"
    children: "dict[int, ContextNode]" = field(default_factory=dict)
    root: RouteNode = field(init=False)
    pins: int = 0
    rate: tuple[int, float] = (-1, 0.0)

    def __post_init__(self) -> None:
        counts = RouteCounts() if self.parent is None else self.parent.root.counts
        self.root = RouteNode(self, counts)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def below(self) -> "Iterator[ContextNode]":
        """All nodes of longer prefixes."""
        nodes = list(self.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

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
    of a STATE are the state's, then its conv window's.
    """

    kind: Kind
    node: ContextNode
    routes: RouteNode
    start: int
    end: int
    pages: np.ndarray
    use: Use

    @property
    def layer_idx(self) -> int:
        """The layer it saves work in."""
        return self.routes.depth - (self.kind is not Kind.HIDDEN)


@dataclass(eq=False)
class Captures:
    """Pages that a prefill fills for the cache while it runs; the cache owns them, and may take them back.

    hidden: layer -> (first row, row behind the last, pages from the one that holds the first).  states: layer -> token
    count -> pages.  closed: nothing more is captured.
    """

    hidden: dict[int, tuple[int, int, np.ndarray]] = field(default_factory=dict)
    states: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    closed: bool = False

    def pages(self) -> list[int]:
        """All pages held."""
        arrays = [pages for _, _, pages in self.hidden.values()]
        arrays += [pages for at_layer in self.states.values() for pages in at_layer.values()]
        return [int(page) for pages in arrays for page in pages]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements two arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
