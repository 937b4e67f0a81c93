"""Eviction by Eq. 5: the arithmetic of heat, depth and priority, and the queue that orders entries by it."""

import math
import random

import pytest

from flexops.runtime.eviction import (
    HALF_LIFE,
    EvictionQueue,
    depth_factor,
    heat_after_access,
    hits_at,
    retention_priority,
)

NEVER = float("-inf")


@pytest.mark.parametrize("clock", [0, 1, 255, 256, 1000, 10**7])
def test_one_access_weighs_two_to_the_number_of_half_lives(clock: int) -> None:
    assert heat_after_access(NEVER, clock) == clock / HALF_LIFE


def test_heat_is_the_sum_of_decayed_accesses() -> None:
    clocks = [0, 3, 3, 100, 256, 700, 701]
    heat = NEVER
    for clock in clocks:
        heat = heat_after_access(heat, clock)
    assert heat == pytest.approx(math.log2(sum(2 ** (clock / HALF_LIFE) for clock in clocks)), abs=1e-12)


def test_an_old_access_is_worth_half_after_a_half_life() -> None:
    two_old = heat_after_access(heat_after_access(NEVER, 0), 0)
    assert two_old == 1.0 == heat_after_access(NEVER, HALF_LIFE)
    assert heat_after_access(NEVER, HALF_LIFE + 1) > two_old > heat_after_access(NEVER, HALF_LIFE - 1)


def test_heat_does_not_overflow_or_lose_new_accesses_after_years() -> None:
    late = 10**9  # 2^(late / HALF_LIFE) is no float
    heat = heat_after_access(heat_after_access(NEVER, 5), late)
    assert heat == late / HALF_LIFE
    assert heat_after_access(heat, late) == late / HALF_LIFE + 1


def test_the_order_of_accesses_does_not_matter() -> None:
    clocks = [1, 40, 300, 900]
    heats = []
    for order in (clocks, clocks[::-1]):
        heat = NEVER
        for clock in order:
            heat = heat_after_access(heat, clock)
        heats.append(heat)
    assert heats[0] == pytest.approx(heats[1], abs=1e-12)


def test_depth_factor_falls_from_one_to_a_half() -> None:
    assert [depth_factor(i, 5) for i in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]
    assert depth_factor(0, 1) == 1.0


@pytest.mark.parametrize(
    ("frequency", "saved_us", "depth", "num_bytes"),
    [(1.0, 1.0, 1.0, 1), (3.0, 250.0, 0.75, 6144), (0.125, 1e6, 0.5, 1 << 30), (40.0, 0.5, 0.9, 2048)],
)
def test_priority_is_eq_5(frequency: float, saved_us: float, depth: float, num_bytes: int) -> None:
    assert retention_priority(frequency, saved_us, depth, num_bytes) == frequency * saved_us * depth / num_bytes


def test_hits_decay_from_the_last_access_on() -> None:
    heat = heat_after_access(heat_after_access(NEVER, 5 * HALF_LIFE), 6 * HALF_LIFE)
    assert hits_at(heat, 6 * HALF_LIFE) == pytest.approx(1.5)
    assert hits_at(heat, 8 * HALF_LIFE) == pytest.approx(0.375)


class Worth:
    """A priority per thing that a test may change, and how often it was asked for."""

    def __init__(self) -> None:
        self.of: dict[str | int, float] = {}
        self.asked = 0

    def __call__(self, thing: str | int) -> float:
        self.asked += 1
        return self.of[thing]


def queue_of(priorities: dict[str | int, float]) -> tuple[Worth, EvictionQueue[str | int]]:
    worth = Worth()
    worth.of.update(priorities)
    queue: EvictionQueue[str | int] = EvictionQueue(worth)
    for thing in priorities:
        queue.push(thing)
    return worth, queue


def drain(queue: EvictionQueue[str | int]) -> list[str | int]:
    out = []
    while (popped := queue.pop()) is not None:
        thing, priority = popped
        assert priority == queue._priority(thing), "the present one"
        out.append(thing)
    return out


def test_the_lowest_priority_comes_first() -> None:
    rng = random.Random(0)
    priorities: dict[str | int, float] = {i: rng.random() for i in range(200)}
    _, queue = queue_of(priorities)
    assert len(queue) == 200
    assert drain(queue) == sorted(priorities, key=lambda i: priorities[i])
    assert len(queue) == 0 and queue.pop() is None


def test_equals_come_in_the_order_they_were_pushed() -> None:
    _, queue = queue_of({"a": 1.0, "b": 1.0, "c": 1.0})
    assert drain(queue) == ["a", "b", "c"]


def test_pop_corrects_what_has_become_worth_more() -> None:
    worth, queue = queue_of({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0})
    worth.of["a"] = 3.5  # nobody told the queue
    assert drain(queue) == ["b", "c", "a", "d"]


def test_pop_corrects_many_at_once_and_loses_none() -> None:
    priorities: dict[str | int, float] = {i: float(i) for i in range(100)}
    worth, queue = queue_of(priorities)
    for i in range(0, 100, 2):
        worth.of[i] = 1000.0 - i
    expected = [*range(1, 100, 2), *range(98, -1, -2)]
    assert drain(queue) == expected


def test_a_second_push_gives_the_present_priority_either_way() -> None:
    worth, queue = queue_of({"a": 1.0, "b": 2.0, "c": 3.0})
    worth.of["c"] = 0.0
    queue.push("c")
    worth.of["a"] = 9.0
    queue.push("a")
    assert len(queue) == 3
    assert drain(queue) == ["c", "b", "a"]


def test_what_was_removed_never_comes_and_may_come_back() -> None:
    _, queue = queue_of({"a": 1.0, "b": 2.0, "c": 3.0})
    queue.remove("a")
    queue.remove("a")
    queue.remove("never there")
    assert len(queue) == 2 and queue.pop() == ("b", 2.0)
    queue.push("a")
    assert drain(queue) == ["a", "c"]


def test_a_removed_place_does_not_stand_for_a_later_push() -> None:
    worth, queue = queue_of({"a": 1.0, "b": 2.0})
    queue.remove("a")
    worth.of["a"] = 5.0
    queue.push("a")
    assert drain(queue) == ["b", "a"]


def test_old_places_are_swept_out() -> None:
    rng = random.Random(1)
    worth, queue = queue_of({i: float(i) for i in range(50)})
    for _ in range(5000):
        thing = rng.randrange(50)
        worth.of[thing] = rng.random()
        queue.push(thing)
        assert len(queue._heap) <= 4 * 50 + 1
    for thing in range(1, 50):
        queue.remove(thing)
    for _ in range(300):
        queue.push(0)
    assert len(queue._heap) <= 65 and drain(queue) == [0]


def test_a_push_and_a_pop_ask_for_few_priorities_however_many_wait() -> None:
    for size in (100, 10_000):
        worth, queue = queue_of({i: float(i) for i in range(size)})
        worth.asked = 0
        for i in range(200):
            queue.push(i % size)
        assert worth.asked == 200
        worth.asked = 0
        for _ in range(50):
            queue.pop()
        assert worth.asked == 50


def test_an_added_thing_is_asked_for_its_priority_when_its_turn_comes() -> None:
    worth, queue = queue_of({"a": 1.0, "b": 2.0})
    worth.asked = 0
    worth.of["c"] = 1.5
    queue.add("c")
    assert worth.asked == 0 and len(queue) == 3
    assert queue.pop() == ("a", 1.0), "c has been asked for, and takes its place"
    assert drain(queue) == ["c", "b"]
    queue.add("d")
    queue.remove("d")
    assert queue.pop() is None


def test_random_traffic_equals_a_sorted_list() -> None:
    rng = random.Random(2)
    worth, queue = queue_of({})
    there: dict[str | int, float] = {}
    for _ in range(4000):
        thing, action = rng.randrange(60), rng.random()
        if action < 0.5:
            worth.of[thing] = there[thing] = rng.random()
            queue.push(thing)
        elif action < 0.6:
            queue.remove(thing)
            there.pop(thing, None)
        elif action < 0.75 and thing in there:
            worth.of[thing] = there[thing] = there[thing] + rng.random()  # worth more, not pushed
        else:
            popped = queue.pop()
            lowest = min(there, key=lambda t: there[t], default=None)
            assert popped == (None if lowest is None else (lowest, there[lowest]))
            if popped is not None:
                del there[popped[0]]
        assert len(queue) == len(there)
