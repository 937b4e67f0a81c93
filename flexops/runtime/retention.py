"""What a cache entry is worth: Eq. 5 with R and H given what else is kept (§6.2)."""

from collections.abc import Sequence

from ..kernels import ATTENTION, SSM
from .cache_tree import ContextNode, Entry, Goal, Kind, RouteNode
from .coordination import CostModel
from .eviction import NEVER, depth_factor, hits_at, retention_priority
from .return_rates import ReturnRates
from .route_counts import Concentration, RouteCounts

LOST = 0.2  # how likely it is that what leads on behind some rows is gone when it is needed


class Retention:
    """Priorities of entries, and what they rest on: what layers cost, and which routes requests take.

    rates: how often texts come again.  counts: the routes that requests of any text took, up to `clock`.
    concentration: how much they say about one text.
    """

    def __init__(self, cost_model: CostModel, page_bytes: int, counts: RouteCounts) -> None:
        self.num_layers = cost_model.config.num_hidden_layers
        self.page_bytes = page_bytes
        self.clock = 0
        self.counts = counts
        self.concentration = Concentration()
        self.rates = ReturnRates()
        self._mixer_us = {route: cost_model.predict_us(route, 256, 256) / 256 for route in (ATTENTION, SSM)}
        self._rest_us = [cost_model.rest_us(layer_idx, 256) / 256 for layer_idx in range(self.num_layers)]

    def layer_us(self, layer_idx: int, route: int) -> float:
        """Microseconds of a prefilled token in a layer, behind some hundreds of others: what R of Eq. 5 counts in."""
        return self._mixer_us[route] + self._rest_us[layer_idx]

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self, node: RouteNode, text: RouteNode | None, routes: Sequence[int], clock: int) -> None:
        """A request has taken these routes through all layers.

        node: behind them.  text: root of the trie of the text that the request had found in the tree, if any.
        """
        if text is not None:
            known, total = text.follow(routes), hits_at(text.use.heat, clock)
            hits = 0.0 if known is None else hits_at(known.use.heat, clock)
            self.concentration.learn(node.counts.share, hits, total)
        self.clock = clock
        for passed in (node, *node.above()):
            passed.counts.count(clock)

    def share(self, node: RouteNode) -> float:
        """Of the requests with a node's text, the share that is expected to take its routes."""
        text = node.context.root.use
        total = hits_at(text.heat, text.used_at)
        return self.concentration.expect(node.counts.share, hits_at(node.use.heat, text.used_at), total)

    def share_with(self, text: ContextNode | None, routes: Sequence[int]) -> float:
        """Of the requests with a text, the share that is expected to take some routes, once another one has.

        text: None for one that is not there.
        """
        counts = self.counts.find(routes)
        hits, total = 1.0, 1.0
        if text is not None:
            known = text.root.follow(routes)
            hits += 0.0 if known is None else hits_at(known.use.heat, self.clock)
            total += hits_at(text.root.use.heat, self.clock)
        return self.concentration.expect(0.0 if counts is None else counts.share, hits, total)

    def parting_share(self, node: RouteNode | None, routes: Sequence[int], layer_idx: int) -> float:
        """Of the requests with a text, the share that takes the given routes up to a layer and another one there.

        node: behind those routes, on the text's last node in the tree; None for a text that is not there.
        """
        counts = self.counts.find(routes[:layer_idx])
        if node is not None:
            onward = node.children.get(routes[layer_idx])
            come, go_on = self.share(node), 0.0 if onward is None else self.share(onward)
        else:
            onward_counts = self.counts.find(routes[: layer_idx + 1])
            come = 1.0 if counts is None or self.counts.heat == NEVER else counts.share
            go_on = 0.0 if onward_counts is None else onward_counts.share
        return max(come - go_on, come * self._surprise(counts))

    def _surprise(self, counts: RouteCounts | None) -> float:
        """How likely a request that has taken some routes is to go on by one that was never seen."""
        seen = 0.0 if counts is None else hits_at(counts.heat, self.clock)
        return 0.5 / (seen + 1)

    # --- priorities -----------------------------------------------------------------------------------------------

    def refresh(self, node: RouteNode) -> list[RouteNode]:
        """Bring goals and `served` up to date from a node on up, after its entries have changed.

        Returns the nodes whose goal is another one now.
        """
        changed = []
        here: RouteNode | None = node
        while here is not None:
            goal, served = here.goal, here.served
            self.refresh_node(here)
            if goal != here.goal:
                changed.append(here)
            elif served == here.served and here is not node:
                break
            here = here.parent
        return changed

    def refresh_node(self, node: RouteNode) -> None:
        """Bring `goal` and `served` of one node up to date with its use, its entries and those of its children."""
        share, goals = self.share(node), []
        if node.hidden is not None:
            goals.append(Goal(share, node.depth, len(node.hidden.pages)))
        if node.depth == self.num_layers and node.edge_pages is not None:
            goals.append(Goal(share, node.depth, 0))
        node.served = share if goals else _served_behind(node)
        for child in node.children.values():
            if child.goal is not None and (pages := child.edge_pages) is not None:
                attention = child.goal.attention + (child.route == ATTENTION)
                goals.append(Goal(child.goal.share, child.goal.depth, child.goal.pages + pages, attention))
        node.goal = max(goals, key=lambda goal: goal.worth(node.depth), default=None)

    def priority(self, entry: Entry) -> float:
        """Eq. 5. H is the text's rate times the share of its requests that the entry is of use to.

        What a layer starts from is of use only together with the layers below and up to the rows it leads to: they
        save together and take room together, and have one priority. Rows (HIDDEN) are counted by themselves: for the
        requests that leave the known routes behind them, before there are others.
        """
        depth, node, tokens = depth_factor(entry.layer_idx, self.num_layers), entry.routes, entry.end - entry.start
        pages = len(entry.pages)
        if entry.kind is Kind.HIDDEN:
            come, go_on = self.share(node), _served_behind(node)
            share = max(come - (1 - LOST) * go_on, come * self._surprise(node.counts))
            saved_us = tokens * self._path_us(node, None)
        elif entry.kind is Kind.STATE and entry.end < max(node.states, default=0):
            # a shorter way for a prefix that ends behind it, where the longest is not of use
            below = max((p for p in node.states if p < entry.end), default=entry.start)
            share = 2.0 ** min(0.0, entry.use.heat - entry.node.root.use.heat)
            saved_us = (entry.end - below) // 4 * self.layer_us(entry.layer_idx, SSM)
        elif node.goal is None:
            share = saved_us = 0.0
        else:
            if entry.kind is Kind.STATE:
                tokens = entry.end - _last_state(entry)
            share, saved_us = node.goal.share, tokens * self._path_us(node, node.goal)
            pages += node.goal.pages
            below_node = node.parent
            while below_node is not None and below_node.hidden is None:
                pages += below_node.edge_pages or 0
                below_node = below_node.parent
        # of two equal ones the later tokens go first: the earlier ones are of no less use
        hits = self.rates.of(entry.node) * share * (1 - 1e-6 * entry.start)
        return retention_priority(hits, saved_us, depth, pages * self.page_bytes)

    def worth_of_new(self, layer_idx: int, num_pages: int, saved_us: float) -> float:
        """The priority of an entry that is being made. saved_us: per lookup, H * R of Eq. 5."""
        depth = depth_factor(layer_idx, self.num_layers)
        return retention_priority(1.0, saved_us, depth, num_pages * self.page_bytes)

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


def _served_behind(node: RouteNode) -> float:
    """The share of a text's requests that pass a node and can start further on."""
    return sum(child.served for child in node.children.values() if child.edge_pages is not None)


def _last_state(entry: Entry) -> int:
    """Tokens of the nearest state of the same layer and routes before an entry, on the nodes above it."""
    shorter = reversed(entry.node.path()[:-1])
    return next((max(here.states) for here in entry.routes.counterparts(shorter) if here.states), 0)
