"""The bound on what a cache can save: against cases whose best choice is plain, and against a search of all of them."""

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from cache_bound import most_saved, most_saved_knowing_shares

SIZES = {"a": 4, "s": 1}
HIDDEN = 3


def saved(requests: list[tuple[str, str]], capacity: int) -> float:
    return most_saved([(text, tuple(layout)) for text, layout in requests], SIZES, HIDDEN, capacity)


def test_with_room_for_all_every_known_layer_is_saved():
    requests = [("x", "as"), ("x", "as"), ("y", "as"), ("x", "aa"), ("y", "ss")]
    assert saved(requests, 10**4) == pytest.approx(2 + 1, abs=1e-3), "the second whole, of the fourth the first layer"


def test_without_room_nothing_is_saved():
    assert saved([("x", "as")] * 10, 0) == pytest.approx(0.0, abs=1e-6)


def test_one_text_in_too_little_room():
    # both layers of a hit take 4 + 1, or the first 1 and the rows behind it 3: two layers for 5, with room for 1 in 10
    assert saved([("x", "sa")] * 10, 1) == pytest.approx(10 * 2 / 5, abs=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_no_static_choice_exceeds_it(seed):
    """Many subsets of entries that fit, kept from their first use on: none saves more than the bound allows."""
    rng = random.Random(seed)
    requests = [(rng.choice("xy"), "".join(rng.choice("as") for _ in range(3))) for _ in range(8)]
    nodes = sorted({(text, layout[:d]) for text, layout in requests for d in (1, 2, 3)})
    things = [(kind, *node) for node in nodes for kind in ("entry", "rows") if kind == "entry" or len(node[1]) < 3]
    for capacity in (2, 5, 9):
        most = saved(requests, capacity)
        best = 0
        for chosen in itertools.islice(_subsets(things, rng), 3000):
            size = sum(SIZES[prefix[-1]] if kind == "entry" else HIDDEN for kind, _, prefix in chosen)
            if size <= capacity:
                best = max(best, _hits(requests, chosen))
        assert best <= most + 1e-6
        assert best > 0 or capacity < 9


@pytest.mark.parametrize("seed", range(4))
def test_no_static_choice_is_expected_to_exceed_what_shares_allow(seed):
    """The same layouts come in every order: no subset of entries that fits saves more on average."""
    rng = random.Random(seed)
    texts, layouts = "xxxyyy", ["".join(rng.choice("as") for _ in range(3)) for _ in range(6)]
    orders = [list(zip(texts, order, strict=True)) for order in set(itertools.permutations(layouts))]
    nodes = [(text, layout[:d]) for text in "xy" for layout in sorted(set(layouts)) for d in (1, 2, 3)]
    things = [(kind, *node) for node in nodes for kind in ("entry", "rows") if kind == "entry" or len(node[1]) < 3]
    subsets = [set(c) for n in (0, 1, 2, 3) for c in itertools.islice(itertools.combinations(things, n), 40)]
    subsets += [{thing for thing in things if rng.random() < 0.4} for _ in range(40)]
    for capacity in (3, 9, 100):
        tuples = [(text, tuple(layout)) for text, layout in zip(texts, layouts, strict=True)]
        most = most_saved_knowing_shares(tuples, SIZES, HIDDEN, capacity)
        means = [
            sum(_hits(requests, chosen) for requests in orders) / len(orders)
            for chosen in [*subsets, set(things)]
            if sum(SIZES[prefix[-1]] if kind == "entry" else HIDDEN for kind, _, prefix in chosen) <= capacity
        ]
        assert max(means) <= most + 1e-6
    assert max(means) > 0.6 * most, "with room for all, nearly what is expected"


def _subsets(things, rng):
    small = itertools.chain.from_iterable(itertools.combinations(things, n) for n in (1, 2, 3))
    yield from map(set, itertools.islice(small, 1500))
    while True:
        yield {thing for thing in things if rng.random() < 0.3}


def _hits(requests, chosen):
    seen, hits = set(), 0
    for text, layout in requests:
        saved, passed = 0, 0
        for depth in range(3):
            there = (text, layout[: depth + 1]) in seen and ("entry", text, layout[: depth + 1]) in chosen
            rows = depth == 0 or ((text, layout[:depth]) in seen and ("rows", text, layout[:depth]) in chosen)
            both = max(saved, passed)
            passed = max(passed, saved if rows else -99)
            saved = both + 1 if there else -99
        hits += max(saved, passed, 0)
        seen |= {(text, layout[:d]) for d in (1, 2, 3)}
    return hits
