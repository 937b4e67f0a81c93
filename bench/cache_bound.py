"""The most token-layers that any cache could save, with all requests known before and any choice of what it keeps when.

A request saves a layer where the layer's KV or state was kept since somebody last had it. Where it passes the prefix
through a layer after one that it saved, the rows that enter there must have been kept. What is kept takes room for as
long as it is kept. With a price for room and time each request decides for itself; for every price, what they save plus
the price of all the room that there is bounds what any policy saves (the Lagrangian dual, room taken on average over
time).
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache

Layout = tuple[str, ...]
Needs = list[tuple[float, float]]


def most_saved(
    requests: Sequence[tuple[Hashable, Layout]], entry_bytes: dict[str, int], hidden_bytes: int, capacity: int
) -> float:
    """Layers saved at most, summed over requests: (text, layout) in order of arrival.

    entry_bytes: by route, what a layer leaves of a text.  hidden_bytes: rows that enter a layer.  capacity: in bytes.
    """
    needs = _needs(requests, entry_bytes, hidden_bytes)

    def bound(price: float) -> float:
        return sum(_best(own, price) for own in needs) + price * capacity * len(requests)

    return _least(bound, 1.0 / min(entry_bytes.values()))


def most_saved_knowing_shares(
    requests: Sequence[tuple[Hashable, Layout]], entry_bytes: dict[str, int], hidden_bytes: int, capacity: int
) -> float:
    """As `most_saved`, expected of the best choice made beforehand, knowing how often each layout comes, but not when.

    What was chosen stays from its first use on, nothing else does. It is what a policy can aim at that has yet to learn
    these shares; one that chooses by what has come so far can do better, where texts have few requests.
    """
    shares: Counter[Layout] = Counter()
    for _, layout in requests:
        shares.update(layout[:depth] for depth in range(len(layout) + 1))
    texts = Counter(text for text, _ in requests)
    # by how often a text comes: how many requests are expected to find the routes of their first layers there
    hits = {
        count: {node: _not_the_first(count, share / len(requests)) for node, share in shares.items()}
        for count in set(texts.values())
    }

    def bound(price: float) -> float:
        prices = {route: price * size for route, size in entry_bytes.items()}
        of_count = {
            count: _best_tree(expected, len(requests[0][1]), prices, price * hidden_bytes)
            for count, expected in hits.items()
        }
        return sum(of_count[count] for count in texts.values()) + price * capacity

    return _least(bound, len(requests) / min(entry_bytes.values()))


def _not_the_first(requests: int, share: float) -> float:
    """Of so many requests, those expected to be of a kind with this share and not the first of it."""
    return requests * share - 1 + (1 - share) ** requests


def _best_tree(hits: dict[Layout, float], num_layers: int, prices: dict[str, float], rows_price: float) -> float:
    """Layers saved for one text by what is best kept, less its price.

    hits: requests that find the routes of their first layers.
    """

    @cache
    def worth(node: Layout, rows_at: int) -> float:
        """Behind some routes, where the deepest rows that are kept on the way stand at `rows_at`."""
        depth, found = len(node), hits.get(node, 0.0)
        if found <= 0 or depth == num_layers:
            return found * (depth - rows_at)
        without = onward(node, rows_at)
        return max(without, found * (depth - rows_at) - rows_price + onward(node, depth)) if depth else without

    def onward(node: Layout, rows_at: int) -> float:
        children = (((*node, route), price) for route, price in prices.items())
        # where a layer is not kept, its rows are passed through it, and are at hand behind it
        return sum(max(worth(child, rows_at) - price, worth(child, len(child))) for child, price in children)

    return worth((), 0)


def _least(bound: Callable[[float], float], high: float) -> float:
    """The least value of a convex function of a price from 0 to `high`, where nothing is worth keeping."""
    low = 0.0
    for _ in range(50):
        third = (high - low) / 3
        low, high = (low, high - third) if bound(low + third) < bound(high - third) else (low + third, high)
    return bound(high)


def _best(needs: Needs, price: float) -> float:
    """Layers that a request saves, less the price of what it needs for it."""
    saved = passed = 0.0  # so far, by what happened in the last layer; rows that enter the first are always there
    for entry, rows in needs:
        saved, passed = max(saved, passed) + 1 - price * entry, max(passed, saved - price * rows)
    return max(saved, passed)


def _needs(requests: Sequence[tuple[Hashable, Layout]], entry_bytes: dict[str, int], hidden_bytes: int) -> list[Needs]:
    """By request and layer: what the layer leaves and what enters it, in bytes times the requests since it was there.

    Infinite where nobody had it.
    """
    last: dict[tuple[Hashable, Layout], int] = {}
    needs: list[Needs] = []
    for now, (text, layout) in enumerate(requests):
        gaps = [now - last.get((text, layout[:depth]), -math.inf) for depth in range(len(layout) + 1)]
        rows = [0.0, *(hidden_bytes * gap for gap in gaps[1:])]
        needs.append([(entry_bytes[route] * gaps[i + 1], rows[i]) for i, route in enumerate(layout)])
        last.update({(text, layout[:depth]): now for depth in range(len(layout) + 1)})
    return needs
