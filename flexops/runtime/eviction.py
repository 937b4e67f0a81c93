"""Which cache entry goes first: retention priority P = H * R * D / M (Eq. 5, §6.2), in a heap with lazy corrections."""

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

NEVER = float("-inf")  # heat before the first access
HALF_LIFE = 128  # accesses of the cache in which the weight of an old access halves


def heat_after_access(heat: float, clock: int) -> float:
    """log2 of the decayed access frequency H after one more access at `clock`, as seen from clock 0.

    All frequencies decay at the same rate, so their order changes by accesses alone: seen from clock 0 an access
    weighs 2^(clock / HALF_LIFE) and nothing has to be updated as time goes by. heat is NEVER before the first access.
    """
    new = clock / HALF_LIFE
    high, low = max(heat, new), min(heat, new)
    return high + math.log2(1 + 2 ** (low - high))


def decay(lookups: int) -> float:
    """What an access weighs after so many more."""
    return 2.0 ** (-lookups / HALF_LIFE)


def depth_factor(depth: int, num_layers: int) -> float:
    """D of Eq. 5: 1 at the first layer, falling to 1/2 at the last, because early layers are shared by more paths."""
    return 1 - 0.5 * depth / max(1, num_layers - 1)


def hits_at(heat: float, clock: int) -> float:
    """The decayed access frequency H as it stands at `clock`."""
    return 2.0 ** (heat - clock / HALF_LIFE)


def retention_priority(hits: float, saved_us: float, depth: float, num_bytes: int) -> float:
    """P of Eq. 5 from H in uses per lookup, R in microseconds, D and M in bytes."""
    return hits * saved_us * depth / num_bytes


class EvictionQueue(Generic[T]):
    """A heap of things by priority, lowest first; `pop` corrects what has become worth more since it was pushed.

    priority: the present priority of a thing.  Each operation is O(log n) amortised: pushing a thing again leaves its
    old place behind, which is skipped when it comes up and swept out once the old places outnumber the things.
    """

    def __init__(self, priority: Callable[[T], float]) -> None:
        self._priority = priority
        self._heap: list[tuple[float, int, T]] = []
        self._place: dict[T, int] = {}  # thing -> number of its valid place
        self._next = 0

    def __len__(self) -> int:
        return len(self._place)

    def push(self, thing: T) -> None:
        """Add a thing, or give one that is in the queue its present priority."""
        self._put(thing, self._priority(thing))

    def add(self, thing: T) -> None:
        """Add a thing without a priority yet: it is asked for once nothing lower is left, maybe never."""
        self._put(thing, -math.inf)

    def _put(self, thing: T, priority: float) -> None:
        self._place[thing] = self._next
        heapq.heappush(self._heap, (priority, self._next, thing))
        self._next += 1
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._place):
            self._heap = [place for place in self._heap if self._place.get(place[2]) == place[1]]
            heapq.heapify(self._heap)

    def remove(self, thing: T) -> None:
        """Take a thing out; one that is not in the queue is ignored."""
        self._place.pop(thing, None)

    def pop(self) -> tuple[T, float] | None:
        """Take out the thing of the lowest priority, with its priority; None when the queue is empty."""
        while self._heap:
            priority, number, thing = heapq.heappop(self._heap)
            if self._place.get(thing) != number:
                continue
            present = self._priority(thing)
            if present > priority + 1e-9 * abs(present) and self._heap and present > self._heap[0][0]:
                self._put(thing, present)
                continue
            del self._place[thing]
            return thing, present
        return None
