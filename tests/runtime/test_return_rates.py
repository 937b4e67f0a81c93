"""H of Eq. 5: how often texts are expected to come again, from how they came so far."""

import random

import numpy as np
import pytest

from flexops.kernels import ATTENTION, SSM
from flexops.runtime.cache_tree import ContextNode
from flexops.runtime.eviction import HALF_LIFE
from flexops.runtime.return_rates import LATE, ReturnRates
from tests.runtime.test_context_cache import assert_whole, small_cache, store, tokens_of


def text(start: int = 0, parent: ContextNode | None = None) -> ContextNode:
    root = parent or ContextNode(np.empty(0, dtype=np.int32), 0, None)
    node = ContextNode(np.arange(start, start + 8, dtype=np.int32), start, root)
    node.root.count_entries(1)  # something of it is kept, so it is looked at
    return node


def use(rates: ReturnRates, node: ContextNode, clock: int) -> None:
    rates.use(node, clock)
    node.root.use.count(clock)


def wait(rates: ReturnRates, until: int) -> list[ContextNode]:
    """Others are asked with in the meantime."""
    found = []
    for clock in range(rates.clock + 1, until + 1):
        rates.clock = clock
        found += rates.silent()
    return found


def test_a_steady_text_gets_its_rate():
    rates, node = ReturnRates(), text()
    for clock in range(1, 20 * HALF_LIFE, 10):
        use(rates, node, clock)
        rates.silent()
    assert rates.gap == pytest.approx(10, rel=0.01)
    assert rates.of(node) == pytest.approx(0.1, rel=0.2)


def test_of_two_texts_the_one_that_comes_more_often_is_expected_more_often():
    rates, often, seldom = ReturnRates(), text(), text()
    for clock in range(1, 200):
        if clock % 5 == 0:
            use(rates, often, clock)
        if clock % 20 == 1:
            use(rates, seldom, clock)
        rates.silent()
    assert 2 < rates.of(often) / rates.of(seldom) < 4.5, "four times as often, drawn towards what is usual"


def test_what_stays_away_is_given_up():
    """Twelve uses every ten lookups, then none: after that a text that has come once is worth more."""
    rates, ended = ReturnRates(), text()
    for clock in range(1, 121, 10):
        use(rates, ended, clock)
    alive = rates.of(ended)
    wait(rates, 120 + 100)
    young = text()
    use(rates, young, rates.clock)
    assert rates.of(ended) < 0.5 * rates.of(young)
    assert rates.of(ended) < 0.2 * alive


def test_a_text_asked_again_within_its_usual_gap_is_not_given_up():
    rates, node = ReturnRates(), text()
    for clock in range(1, 400, 20):
        use(rates, node, clock)
        rates.silent()
    before = rates.of(node)
    wait(rates, rates.clock + 20)
    assert rates.of(node) > 0.9 * before


def test_how_many_come_again_is_learnt_and_for_continuations_apart():
    """Texts of their own all come again, their continuations never do."""
    rates = ReturnRates()
    before = rates.of_new(continues=False), rates.of_new(continues=True)
    assert before[0] == before[1]
    own = [text() for _ in range(4)]
    for clock in range(1, 81):
        use(rates, own[clock % 4], clock)
        use(rates, text(start=8, parent=own[clock % 4]), clock)
        rates.silent()
    assert rates.of_new(continues=False) > 5 * rates.of_new(continues=True)


def test_silence_is_told_once_it_is_long_and_each_time_it_has_doubled():
    rates, node = ReturnRates(), text()
    use(rates, node, 1)
    gap = rates.gap
    told = []
    for clock in range(2, 500):
        rates.clock = clock
        told += [clock - 1 for found in rates.silent() if found is node]
    expected = [LATE * gap * 2**k for k in range(4)]
    assert told == pytest.approx(expected, abs=1)


def test_a_text_that_came_again_or_has_nothing_kept_is_not_told_of():
    rates, again, empty = ReturnRates(), text(), text()
    empty.root.count_entries(-1)
    use(rates, empty, 1)
    for clock in range(1, 200, 8):
        use(rates, again, clock)
        assert not rates.silent()


def test_a_second_use_by_the_same_request_counts_once():
    rates, node = ReturnRates(), text()
    use(rates, node, 5)
    use(rates, node, 9)
    rate = rates.of(node)
    rates.use(node, 9)
    rates.use(node, 7)  # looked up earlier, ended later
    assert rates.of(node) == rate and rates.clock == 9


@pytest.mark.parametrize("silence", [0, 1, 10**3, 10**6, 10**9])
def test_rates_stay_finite(silence):
    rates, node = ReturnRates(), text()
    rng = random.Random(1)
    clock = 0
    for _ in range(50):
        clock += rng.randrange(1, 9)
        use(rates, node, clock)
    rates.clock = clock + silence
    rates.silent()
    assert 0.0 <= rates.of(node) < 1.0


# --- in the cache -----------------------------------------------------------------------------------------------------


def test_a_dead_text_goes_before_one_that_is_asked_with_still():
    """Both have had the same number of uses; the room is for one and a half of them."""
    kept, routes = small_cache(cache_bytes=40 * 2048), (ATTENTION, SSM, ATTENTION)
    dead, alive = tokens_of([1], range(40)), tokens_of([2], range(40))
    for _ in range(6):
        store(kept, dead, routes)
    for _ in range(6):
        for _ in range(9):
            kept.clock += 1
        store(kept, alive, routes)
    for i in range(12):
        store(kept, tokens_of([100 + i], range(40)), routes)
        if i % 3 == 2:
            store(kept, alive, routes)
    assert_whole(kept)
    assert kept.match(alive)[1] == len(alive)
    assert kept.match(dead)[1] == 0, "its node went with its entries"
