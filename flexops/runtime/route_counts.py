"""How often requests take which routes: what every text together tells about the layouts of one.

A gate sees few kinds of prompts, so layouts recur: in the paper six of them cover 90% of the requests (Fig. 13). What a
text is asked next with is therefore expected from both: from the routes that requests with this text took, and from
those that requests with any text took. Which weighs more is learnt from how well either would have predicted.
"""

import math
from collections.abc import Sequence
from weakref import WeakValueDictionary

from .eviction import NEVER, heat_after_access

# How many requests with a text the routes of all texts weigh as much as. Small where a text keeps its layout (the turns
# of a conversation), large where its layout changes with every question.
CONCENTRATIONS = (0.1, 0.5, 2.0, 8.0)
FORGETTING = 0.99  # per prediction
LEAST_SHARE = 1e-3  # of a layout that was never seen, so that one surprise does not decide for good


class RouteCounts:
    """Requests of any text whose first layers took the routes on the way here.

    heat: see `heat_after_access`.  root: of the trie.  A node lives as long as somebody holds it or one behind it.
    """

    __slots__ = ("__weakref__", "_children", "_parent", "heat", "root")

    def __init__(self, parent: "RouteCounts | None" = None) -> None:
        self._parent = parent  # keeps it alive
        self._children: WeakValueDictionary[int, RouteCounts] = WeakValueDictionary()
        self.heat = NEVER
        self.root: RouteCounts = self if parent is None else parent.root

    def child(self, route: int) -> "RouteCounts":
        """The node behind one more route, made where it is missing."""
        found = self._children.get(route)
        if found is None:
            found = self._children[route] = RouteCounts(self)
        return found

    def find(self, routes: Sequence[int]) -> "RouteCounts | None":
        """The node behind some more routes, where it is."""
        node: RouteCounts | None = self
        for route in routes:
            node = None if node is None else node._children.get(route)
        return node

    def count(self, clock: int) -> None:
        """One more request."""
        self.heat = heat_after_access(self.heat, clock)

    @property
    def share(self) -> float:
        """Of all requests."""
        return 2.0 ** (self.heat - self.root.heat) if self.heat > NEVER else 0.0


class Concentration:
    """Chooses from CONCENTRATIONS the one that would have predicted the layouts seen so far best."""

    def __init__(self) -> None:
        self.value = 1.0
        self._fits = [0.0] * len(CONCENTRATIONS)

    def expect(self, share: float, hits: float, total: float) -> float:
        """The share of a text's requests that take some routes.

        share: of all texts' requests.  hits, total: of this text's requests so far, those that took them and all.
        """
        return (hits + self.value * share) / (total + self.value)

    def learn(self, share: float, hits: float, total: float) -> None:
        """A further request with the text took these routes through all layers."""
        share = max(share, LEAST_SHARE)
        for i, weight in enumerate(CONCENTRATIONS):
            self._fits[i] = FORGETTING * self._fits[i] + math.log((hits + weight * share) / (total + weight))
        self.value = CONCENTRATIONS[self._fits.index(max(self._fits))]
