"""How often a text is expected to be asked with again: H of Eq. 5, as a rate.

A count of accesses keeps what was popular once, and prefers the first turns of a conversation to its last. So H is what
is expected of somebody who comes at random times until he comes no more (BG/NBD): uses over the time since the first
one, drawn towards what is usual, times the probability that there will be another, which falls once a text stays away
for long by its own rate. How many come again, and after how long, is learnt from all texts: from prompts of their own
and from continuations of others apart, and from those that came again before and those that did not.
"""

import heapq
import math
from dataclasses import dataclass

from .cache_tree import ContextNode
from .eviction import HALF_LIFE, decay

PRIOR_RETURNS = 2.0  # what is usual weighs as much as so many returns ...
PRIOR_GAPS = 5.0  # ... within so many usual gaps: fewer than one a gap, as texts are compared when they have come
LATE = 3.0  # usual gaps of silence after which a text counts as one that stays away
FORGETTING = 0.99  # per observation


@dataclass
class _Returns:
    """Uses of a kind of text after which it came again, and after which it stayed away."""

    came: float = 1.0
    stayed: float = 0.1

    @property
    def share(self) -> float:
        return self.came / (self.came + self.stayed)


class ReturnRates:
    """What is known of when texts, nodes of the outer tree, come again. Rates are uses per lookup of the cache.

    clock: now, in lookups.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._returns = {(continues, again): _Returns() for continues in (False, True) for again in (False, True)}
        self._gaps, self._num_gaps = 16.0, 1.0  # lookups between two uses, summed
        self._watched: list[tuple[float, int, int, bool, ContextNode]] = []  # heap by when to look, see `_watch`
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
        rate = (use.hits - first + PRIOR_RETURNS) / (time + PRIOR_GAPS * self.gap)
        share = self._returns[_kind(text)].share
        silence = min(50.0, rate * max(0, self.clock - use.used_at))
        return rate * share / (share + (1 - share) * math.exp(silence))

    def use(self, text: ContextNode, clock: int) -> None:
        """A request that looked up at `clock` uses a text; its node does not count it yet."""
        self.clock = max(self.clock, clock)
        use = text.root.use
        if clock <= use.used_at:
            return
        if use.since >= 0:
            self._observe(text, came=1.0)
            self._gaps = FORGETTING * self._gaps + clock - use.used_at
            self._num_gaps = FORGETTING * self._num_gaps + 1
        self._watch(text, clock, LATE * self.gap, late=False)

    def silent(self) -> list[ContextNode]:
        """Texts whose silence has become long, or twice as long: they are worth less than when they were last asked."""
        found = []
        while self._watched and self._watched[0][0] <= self.clock:
            due, _, used_at, late, text = heapq.heappop(self._watched)
            if text.root.use.used_at != used_at:
                continue
            if not late:
                self._observe(text, stayed=1.0)
            if text.root.num_entries:
                found.append(text)
                self._watch(text, used_at, 2 * (due - used_at), late=True)
        return found

    def _watch(self, text: ContextNode, used_at: int, silence: float, late: bool) -> None:
        """Look at a text again when it has been silent for so long since `used_at`. late: it has counted as such."""
        self._pushed += 1
        heapq.heappush(self._watched, (used_at + silence, self._pushed, used_at, late, text))

    def _observe(self, text: ContextNode, came: float = 0.0, stayed: float = 0.0) -> None:
        seen = self._returns[_kind(text)]
        seen.came, seen.stayed = FORGETTING * seen.came + came, FORGETTING * seen.stayed + stayed


def _kind(text: ContextNode) -> tuple[bool, bool]:
    """Whether a text goes on where another one ends, and whether it has come again before."""
    use = text.root.use
    return text.start > 0, use.used_at > use.since
