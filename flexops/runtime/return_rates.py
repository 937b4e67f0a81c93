"""How often a text is expected to be asked again: H of Eq. 5, as a rate.

A count of accesses keeps what was popular once, and prefers the first turns of a conversation to its last. So H is what
is expected of somebody who comes at random times until he comes no more, after the BG/NBD model: returns over the time
between the first use and the last, drawn towards what is usual, times the probability that there will be another, which
falls once a text stays away for long by its own rate.

How many come again, and after how long, is learnt from the requests: apart for prompts of their own and for
continuations of others, and for texts that came again before and those that did not. What comes again after it has been
given up and evicted is a new text.
"""

import heapq
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .cache_tree import ContextNode
from .eviction import HALF_LIFE, decay

# What is usual, weighed as so many returns in so many usual gaps: less than one a gap, as a rate counts up to the last
# use, where texts look more frequent than they are.
PRIOR_RETURNS, PRIOR_GAPS = 2.0, 5.0
LATE = 3.0  # usual gaps of silence after which a text counts as one that stays away
FORGETTING = 0.99  # per observation
MOST_AT_ONCE = 4  # silent texts that one request looks at


@dataclass
class _Returns:
    """Uses of a kind of text after which it came again, and after which it stayed away.

    came_at, stayed_at: clock of the request that the last of either was seen of; each request is one observation.
    """

    came: float = 1.0
    stayed: float = 0.1
    came_at: int = -1
    stayed_at: int = -1

    @property
    def share(self) -> float:
        return self.came / (self.came + self.stayed)

    def observe(self, came: float, stayed: float) -> None:
        self.came, self.stayed = FORGETTING * self.came + came, FORGETTING * self.stayed + stayed


@dataclass(order=True)
class _Watch:
    """When to look at a text again.

    number: in the order they were made.  used_at: its last use then.  kind: as it is behind that use.
    late: it has counted as one that stays away.
    """

    due: float
    number: int
    used_at: int
    kind: tuple[bool, bool]
    late: bool
    text: "weakref.ref[ContextNode]"


class ReturnRates:
    """What is known of when texts, nodes of the outer tree, come again. Rates are uses per lookup of the cache.

    clock: now, in lookups.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._returns = {(continues, again): _Returns() for continues in (False, True) for again in (False, True)}
        self._gaps, self._num_gaps = 16.0, 1.0  # lookups between two uses, summed
        self._watched: list[_Watch] = []  # a heap
        self._pushed = 0

    @property
    def gap(self) -> float:
        """Lookups after which a text that comes again does so on average."""
        return self._gaps / self._num_gaps

    def of_new(self, continues: bool) -> float:
        """The rate of a text that comes for the first time. continues: it goes on where one that was known ends."""
        return PRIOR_RETURNS / (PRIOR_GAPS * self.gap) * self._returns[continues, False].share

    def of(self, text: ContextNode) -> float:
        """The rate of a text as of now, not above that of what it continues."""
        parts, part = [], text
        while part.parent is not None and part.rate[0] != self.clock:
            parts.append(part)
            part = part.parent
        rate = math.inf if part.parent is None else part.rate[1]
        for part in reversed(parts):
            rate = min(rate, self._of_itself(part))
            part.rate = self.clock, rate
        return rate

    def _of_itself(self, text: ContextNode) -> float:
        use = text.root.use
        first = decay(use.used_at - use.since)  # what is left of the first use, which was no return
        time = HALF_LIFE / math.log(2) * (1 - first)
        rate = (max(0.0, use.hits - first) + PRIOR_RETURNS) / (time + PRIOR_GAPS * self.gap)
        share = self._returns[text.start > 0, use.used_at > use.since].share
        silence = min(50.0, rate * max(0, self.clock - use.used_at))
        return rate * share / (share + (1 - share) * math.exp(silence))

    def use(self, texts: Sequence[ContextNode], clock: int) -> None:
        """A request that looked up at `clock` uses texts, a prefix and what continues it; they do not count it yet.

        It is one observation of each kind, and the longest text that was known tells the gap.
        """
        self.clock = max(self.clock, clock)
        known = False
        for text in reversed(texts):
            use, text.rate = text.root.use, (-1, 0.0)
            if 0 <= use.used_at < clock:
                seen = self._returns[text.start > 0, use.used_at > use.since]
                if seen.came_at != clock:
                    seen.came_at = clock
                    seen.observe(came=1.0, stayed=0.0)
                if not known:
                    self._gaps = FORGETTING * self._gaps + clock - use.used_at
                    self._num_gaps = FORGETTING * self._num_gaps + 1
                known = True
            if clock > use.used_at:
                self._watch(text, clock, (text.start > 0, use.since >= 0), LATE * self.gap, late=False)

    def watch_cut(self, text: ContextNode) -> None:
        """A node was cut: this is its new upper part. Whatever becomes of it, the lower part is observed."""
        use = text.root.use
        self._watch(text, use.used_at, (text.start > 0, use.used_at > use.since), LATE * self.gap, late=True)

    def forget_watched(self) -> None:
        """What is cached has been dropped on purpose: that nobody comes again tells nothing."""
        self._watched.clear()

    def silent(self) -> list[ContextNode]:
        """Texts whose silence has become long, or twice as long: they are worth less than when they were last used.

        A few at a time; the others wait for the next call.
        """
        found: list[ContextNode] = []
        while self._watched and self._watched[0].due <= self.clock and len(found) < MOST_AT_ONCE:
            watch = heapq.heappop(self._watched)
            text = watch.text()
            if text is not None and text.root.use.used_at != watch.used_at:
                continue
            seen = self._returns[watch.kind]
            if not watch.late and seen.stayed_at != watch.used_at:
                seen.stayed_at = watch.used_at
                seen.observe(came=0.0, stayed=1.0)
            if text is not None and text.root.num_entries:
                found.append(text)
                self._watch(text, watch.used_at, watch.kind, 2 * (watch.due - watch.used_at), late=True)
        return found

    def _watch(self, text: ContextNode, used_at: int, kind: tuple[bool, bool], silence: float, late: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._watched, _Watch(used_at + silence, self._pushed, used_at, kind, late, weakref.ref(text)))
