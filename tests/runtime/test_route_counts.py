"""What is expected of a text's next request: from its own routes, from those of all texts, and how either weighs."""

import gc
import itertools

import pytest

from flexops.kernels import ATTENTION, SSM
from flexops.runtime.context_cache import FORGOTTEN
from flexops.runtime.eviction import HALF_LIFE, heat_after_access, hits_at
from flexops.runtime.route_counts import CONCENTRATIONS, Concentration, RouteCounts
from tests.runtime.test_context_cache import LAYERS, assert_whole, entries_of, small_cache, store, tokens_of

A, S = ATTENTION, SSM


def counted(layouts: list[tuple[int, ...]], clock: int = 0) -> tuple[RouteCounts, list[RouteCounts]]:
    root, kept = RouteCounts(), []
    for layout in layouts:
        node = root
        node.count(clock)
        for route in layout:
            node = node.child(route)
            node.count(clock)
        kept.append(node)
    return root, kept


def test_shares_are_those_of_the_requests():
    root, _ = counted([(A, S), (A, A), (A, S), (S, S)])
    assert root.share == 1.0
    shares = {routes: root.find(routes).share for routes in ((A,), (S,), (A, S), (A, A), (S, S))}
    assert shares == pytest.approx({(A,): 0.75, (S,): 0.25, (A, S): 0.5, (A, A): 0.25, (S, S): 0.25})
    assert root.find((S, A)) is None and root.child(S).child(A).share == 0.0


def test_a_share_falls_by_half_while_others_take_other_routes():
    root, kept = counted([(A,)], clock=0)
    other = root.child(S)
    for _ in range(3):  # now the one request of before counts a half
        root.heat, other.heat = (heat_after_access(heat, HALF_LIFE) for heat in (root.heat, other.heat))
    assert kept[0].share == pytest.approx(0.5 / 3.5) and other.share == pytest.approx(3 / 3.5)


def test_routes_that_nobody_holds_are_forgotten():
    root, kept = counted([(A, S), (S, S)])
    del kept[0]
    gc.collect()
    assert root.find((A,)) is None and root.find((S, S)) is kept[0]


def test_expectation_lies_between_the_texts_own_routes_and_those_of_all():
    weighed = Concentration()
    weighed.value = 2.0
    assert weighed.expect(share=0.25, hits=0.0, total=0.0) == 0.25, "nothing known of the text"
    assert weighed.expect(share=0.25, hits=4.0, total=4.0) == pytest.approx((4 + 0.5) / 6)
    assert weighed.expect(share=0.0, hits=4.0, total=4.0) == pytest.approx(4 / 6)
    shares = [weighed.expect(share, hits, 5.0) for share, hits in ((0.5, 3.0), (0.25, 2.0), (0.25, 0.0))]
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize("keeps", [True, False], ids=["a text keeps its layout", "each request has another"])
def test_the_weight_is_learnt(keeps):
    weighed = Concentration()
    for i in range(40):
        seen = 1.0 + i % 4
        weighed.learn(share=0.2, hits=seen if keeps else 0.0, total=seen)
    assert weighed.value == (min(CONCENTRATIONS) if keeps else max(CONCENTRATIONS))
    for i in range(400):  # and learnt anew where that changes
        seen = 1.0 + i % 4
        weighed.learn(share=0.2, hits=0.0 if keeps else seen, total=seen)
    assert weighed.value == (max(CONCENTRATIONS) if keeps else min(CONCENTRATIONS))


# --- in the cache -----------------------------------------------------------------------------------------------------


def test_of_two_texts_seen_once_the_one_with_the_common_layout_stays():
    common, rare = (A, S, S), (A, S, A)
    kept = small_cache()
    for first in range(6):
        store(kept, tokens_of([first], range(31)), common)
    for layout in ((40, rare), (50, common)), ((50, common), (40, rare)):
        for first, routes in layout:
            store(kept, tokens_of([first], range(31)), routes)
    kept.retention.concentration.value = max(CONCENTRATIONS)
    leaves = [(kept.root.children[first].root, routes) for first, routes in ((40, rare), (50, common))]
    rare_share, common_share = (kept.retention.share(root.follow(routes)) for root, routes in leaves)
    assert common_share > 0.7 > rare_share > 0.15


def test_rows_are_worth_what_requests_leave_the_known_routes_there():
    kept = small_cache()
    for _ in range(8):
        node = store(kept, tokens_of(range(32)), (A, S, S), hidden=[1, 2])
    for _ in range(4):
        store(kept, tokens_of(range(32)), (A, A, A))  # those leave at layer 1
    kept.retention.concentration.value = 1.0
    worth = {layer_idx: kept._priority(node.root.follow((A, S)[:layer_idx]).hidden) for layer_idx in (1, 2)}
    assert worth[1] > 0 and worth[2] > 0
    kept.retention.refresh(node.root.follow((A, A, A)))
    first, second = (kept.retention.parting_share(node.root.follow((A, S)[:i]), (A, S, S), i) for i in (1, 2))
    assert first == pytest.approx(4 / 12, abs=0.01), "four of twelve take attention at layer 1"
    assert second < 0.06, "nobody has left at layer 2"


def test_a_continued_text_is_never_expected_more_often_than_what_it_continues():
    kept, tokens = small_cache(), list(range(20))
    for turn in range(6):
        node = store(kept, tokens_of(tokens), (A, S, S))
        tokens += range(20 * (turn + 1), 20 * (turn + 2))
    rates = [kept.retention.rates.of(part) for part in node.path()]
    assert len(rates) == 6 and rates[-1] > 0.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))


def test_routes_are_remembered_without_entries_but_not_for_ever():
    kept = small_cache()
    every = list(itertools.product((A, S), repeat=LAYERS))
    for routes in every:
        node = store(kept, tokens_of(range(20)), routes)
    for entry in [e for e in entries_of(kept) if e.routes.follow(()) is not None and e.routes.depth > 1]:
        kept._drop(entry)
    root = node.root
    assert_whole(kept)
    assert all(root.follow(routes) is not None for routes in every), "they count"
    assert hits_at(root.follow(every[0]).use.heat, kept.clock) > FORGOTTEN
    kept.clock += 7 * HALF_LIFE
    store(kept, tokens_of(range(20)), every[-1])
    left = [routes for routes in every if root.follow(routes) is not None]
    assert every[-1] in left and not [r for r in left if r[:2] not in (every[-1][:2], (A, A), (A, S))]
    assert len(left) < len(every)
    assert_whole(kept)
