"""H of Eq. 5: how often texts are expected to come again, from how they came so far."""

import gc
import random
import weakref

import numpy as np
import pytest

from flexops.kernels import ATTENTION, SSM
from flexops.runtime import SamplingParams
from flexops.runtime.cache_tree import ContextNode
from flexops.runtime.context_cache import ContextCache
from flexops.runtime.eviction import HALF_LIFE
from flexops.runtime.prefix_reuse import PrefixReuse
from flexops.runtime.return_rates import LATE, ReturnRates
from tests.runtime.serving import small_engine
from tests.runtime.test_context_cache import assert_whole, model, small_cache, store, tokens_of


def text(start: int = 0, parent: ContextNode | None = None) -> ContextNode:
    root = parent or ContextNode(np.empty(0, dtype=np.int32), 0, None)
    node = ContextNode(np.arange(start, start + 8, dtype=np.int32), start, root)
    node.root.count_entries(1)  # something of it is kept, so it is looked at
    return node


def use(rates: ReturnRates, node: ContextNode, clock: int) -> None:
    """A request with a text and all that it continues."""
    rates.use(node.path(), clock)
    for part in node.path():
        part.root.use.count(clock)


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
    """Texts of their own all come again, their continuations never do, until they always do."""
    rates = ReturnRates()
    assert rates.of_new(continues=False) == rates.of_new(continues=True)
    own = [text() for _ in range(4)]
    for clock in range(1, 161):
        use(rates, text(start=8, parent=own[clock % 4]), clock)
        rates.silent()
    assert rates.gap == pytest.approx(4, rel=0.1)
    assert rates.of_new(continues=False) > 5 * rates.of_new(continues=True)
    continued = [text(start=8, parent=node) for node in own]
    for clock in range(161, 700):
        use(rates, continued[clock % 4], clock)
        if clock % 40 > 35:
            continued[clock % 4] = text(start=8, parent=own[clock % 4])
        rates.silent()
    assert rates.of_new(continues=False) < 3 * rates.of_new(continues=True)


def test_those_that_came_again_are_learnt_of_apart():
    """Of ten new texts one comes again, and then for good."""
    rates, steady = ReturnRates(), text()
    for clock in range(1, 600):
        use(rates, steady if clock % 4 == 0 else text(), clock)
        rates.silent()
    once = text()
    use(rates, once, 600)
    assert rates.of(steady) > 8 * rates.of(once)
    wait(rates, 606)
    assert rates.of(steady) > 8 * rates.of(once), "four gaps do not give it up"


def test_no_text_is_expected_more_often_than_what_it_continues():
    rates, stem, busy = ReturnRates(), text(), text()
    for clock in range(1, 400):
        use(rates, busy if clock % 40 else stem, clock)
    young = text(start=8, parent=stem)
    use(rates, young, rates.clock + 1)
    assert rates.of_new(continues=True) > rates.of(stem), "by itself it would be expected more often"
    assert rates.of(young) == rates.of(stem)


def share_of_returns(rates: ReturnRates, again: bool) -> float:
    """Of continuations; read where all texts of a kind have the same rate but for it."""
    return rates._returns[True, again].share


def test_a_turn_of_a_conversation_and_its_end_are_one_observation_each():
    rates, clock, turns = ReturnRates(), 0, [text()]
    for _ in range(200):
        clock += 1
        turns.append(text(start=turns[-1].start + 8, parent=turns[-1]))
        use(rates, turns[-1], clock)
    assert share_of_returns(rates, again=True) > 0.95
    wait(rates, clock + 500)  # two hundred turns fall silent together
    ended = share_of_returns(rates, again=True)
    assert ended > 0.95
    for _ in range(30):  # others come twice and stay away
        other = text(start=8, parent=text())
        for _ in range(2):
            use(rates, other, rates.clock + 1)
        wait(rates, rates.clock + 200)
    before = share_of_returns(rates, again=True)
    assert before < 0.8
    use(rates, turns[-1], rates.clock + 1)  # two hundred turns come again together
    assert before < share_of_returns(rates, again=True) < before + 0.01


def test_a_text_that_stays_away_is_one_observation_however_long():
    rates, early, late = ReturnRates(), text(), text()
    use(rates, early, 1)
    use(rates, late, 2)
    wait(rates, 1000)
    came, stayed = 0.99**2, 0.99 * (0.99 * 0.1 + 1) + 1
    assert rates.of_new(continues=False) == pytest.approx(2 / (5 * 16) * came / (came + stayed))


def test_the_longest_known_text_tells_the_gap():
    """Behind one system prompt eight tools take turns."""
    rates, system = ReturnRates(), text()
    tools = [text(start=8, parent=system) for _ in range(8)]
    for clock in range(1, 400):
        use(rates, tools[clock % 8], clock)
    assert rates.gap == pytest.approx(8, rel=0.05)


def test_texts_that_are_gone_are_not_kept_alive():
    rates, node = ReturnRates(), text()
    gone = weakref.ref(node)
    use(rates, node, 1)
    del node
    gc.collect()
    assert gone() is None
    share = rates.of_new(continues=False) * rates.gap
    assert not wait(rates, 200)
    assert rates.of_new(continues=False) * rates.gap < share, "it has not come again"


def test_a_few_silent_texts_at_a_time():
    rates = ReturnRates()
    texts = [text() for _ in range(11)]
    for node in texts:
        use(rates, node, 1)
    rates.clock = 60
    told = [len(rates.silent()) for _ in range(4)]
    assert told == [4, 4, 3, 0]


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
    rates.use([node], 9)
    assert rates.of(node) == rate and rates.gap < 16
    before = rates.gap
    use(rates, node, 7)  # looked up earlier, ended later
    assert rates.clock == 9 and rates.gap == before
    assert (node.root.use.since, node.root.use.used_at) == (5, 9)
    assert rates.of(node) > rate, "it is one more use in the same time"


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


ROUTES = (ATTENTION, SSM, ATTENTION)


def once(kept: ContextCache, first: int) -> None:
    store(kept, tokens_of([first], range(40)), ROUTES)


def test_texts_that_never_come_again_do_not_drive_out_one_that_does() -> None:
    """Twelve in a row would, if the least recently used went first: there is room for four."""
    kept, steady = small_cache(cache_bytes=40 * 2048), tokens_of([1], range(40))
    for i in range(60):
        store(kept, steady, ROUTES) if i % 4 == 0 else once(kept, 100 + i)
    for i in range(12):
        once(kept, 1000 + i)
    node, length = kept.match(steady)
    assert length == len(steady)
    assert node.root.follow(ROUTES).kv is not None and node.root.follow(ROUTES[:2]).states, "whole"
    assert_whole(kept)


def test_what_was_popular_once_goes_before_what_is_still_asked_with() -> None:
    """By number of uses it would stay, thirty against ten; its place in the queue of old has to be corrected for it."""
    kept, popular, steady = small_cache(cache_bytes=16 * 2048), tokens_of([1], range(40)), tokens_of([2], range(40))
    for _ in range(30):
        store(kept, popular, ROUTES)
    node, length = kept.match(popular)
    assert length == len(popular)
    kept._requeue(node.root.subtree())  # as when something was evicted
    for _ in range(10):
        kept.clock += 20
        store(kept, steady, ROUTES)
    assert kept.match(steady)[1] == len(steady)
    store(kept, tokens_of([3], range(40)), ROUTES)  # there is no room for three
    assert kept.match(steady)[1] == len(steady)
    assert kept.match(popular)[1] == 0, "its node went with its entries"
    assert_whole(kept)


def test_what_a_prefill_captures_is_as_likely_to_be_of_use_as_its_text_is_to_come() -> None:
    kept, known = small_cache(), tokens_of([1], range(40))
    for i in range(30):
        store(kept, known, ROUTES)
        once(kept, 100 + i)
    rates = kept.retention.rates
    reuse = PrefixReuse(kept, tokens_of(known, [99] * 8), most=48, grid=1)
    assert reuse.length == len(known) and reuse._rate(0) == reuse._rate(40) == rates.of(reuse.node)
    assert reuse._rate(41) == min(rates.of(reuse.node), rates.of_new(continues=True))
    other = PrefixReuse(kept, tokens_of([7], range(40)), most=41, grid=1)
    assert not other.length and other._rate(0) == rates.of_new(continues=False)
    assert rates.of(reuse.node) > 2 * rates.of_new(continues=False)
    reuse.close()
    other.close()
    assert_whole(kept)


def test_a_cut_by_a_request_that_ends_early_does_not_keep_a_text_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, text_of = small_cache(), tokens_of([1], range(40))
    for _ in range(5):
        store(kept, text_of, ROUTES)
    upper, length = kept.match(text_of[:20])  # and nothing is published
    assert length == 20 and upper.root.num_entries
    silent, told = kept.retention.rates.silent, []
    monkeypatch.setattr(kept.retention.rates, "silent", lambda: told.extend(found := silent()) or found)
    for i in range(200):
        once(kept, 100 + i % 3)
    assert upper in told


def test_an_answer_is_no_return_of_its_prompt() -> None:
    engine = small_engine(model(), reuse_generated=True)
    rates = engine.cache.retention.rates
    for i in range(20):
        engine.add_request([i + 2, *range(2, 30)], SamplingParams(max_new_tokens=4, n=3, seed=1, temperature=1.0))
        while engine.has_unfinished():
            engine.step()
        node, length = engine.cache.match(np.array([i + 2, *range(2, 29)], dtype=np.int32))
        assert length == 28 and node.root.use.hits == pytest.approx(1.0)
    assert rates.gap == 16.0, "nothing has come again"


def test_lookups_of_a_request_that_cannot_be_admitted_do_not_count() -> None:
    engine = small_engine(model(), memory_bytes=1 << 16)
    for i in range(2):
        engine.add_request([i + 2, *range(2, 100)], SamplingParams(max_new_tokens=8))
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    assert steps > 4 and engine.cache.clock == 2 + engine.stats()["preemptions"]
