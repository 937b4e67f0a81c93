"""Any order of adding, stepping, aborting and preempting: tokens as if alone, the pool whole after every step."""

import dataclasses
import random
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexops import FlexHybridModel
from tests.runtime.serving import Asked, Given, alone, collect, random_requests, small_engine
from tests.tiny import make_model

KINDS = 16


@cache
def model() -> FlexHybridModel:
    return make_model(num_hidden_layers=3)


@cache
def all_asked() -> list[Asked]:
    """The odd ones begin with a prefix of one prompt that they share."""
    asked, rng = random_requests(model(), KINDS, longest=40, seed=21), random.Random(22)
    shared = tuple(rng.randrange(2, 258) for _ in range(30))
    for i in range(1, KINDS, 2):
        prompt = (*shared[: rng.randint(4, 30)], *asked[i].prompt[: rng.randint(0, 10)])
        asked[i] = dataclasses.replace(asked[i], prompt=prompt)
    return asked


def asked(kind: int) -> Asked:
    return all_asked()[kind]


@cache
def expected(kind: int) -> Given:
    return alone(model(), asked(kind), context_cache=None)


@cache
def page_bytes() -> int:
    return small_engine(model()).pool.layout.page_bytes


class Life(RuleBasedStateMachine):
    """An engine with a pool of a few requests' size, slicing prompts at odd places."""

    @initialize(
        pages=st.integers(20, 90),
        budget=st.integers(3, 80),
        slots=st.integers(1, 5),
        selective=st.booleans(),
        static=st.booleans(),
        kept=st.sampled_from([("hybrid", "auto"), ("hybrid", "paper"), ("conventional", "auto"), (None, "auto")]),
        cache_pages=st.sampled_from([None, 3, 12, 20]),
    )
    def start(
        self,
        pages: int,
        budget: int,
        slots: int,
        selective: bool,
        static: bool,
        kept: tuple[str | None, str],
        cache_pages: int | None,
    ) -> None:
        self.engine = small_engine(
            model(),
            memory_bytes=pages * page_bytes(),
            max_batched_tokens=budget,
            decode_slowdown=None,
            max_num_requests=slots,
            selective_batching=selective,
            static_decode=static,
            context_cache=kept[0],
            cache_entries=kept[1],
            cache_bytes=None if cache_pages is None else cache_pages * page_bytes(),
            reuse_generated=False,
        )
        self.kinds: dict[int, int] = {}
        self.given: dict[tuple[int, int], Given] = {}
        self.checked: set[int] = set()

    @rule(kind=st.integers(0, KINDS - 1), priority=st.integers(0, 2))
    def add(self, kind: int, priority: int) -> None:
        a = asked(kind)
        try:
            request_id = self.engine.add_request(a.prompt, a.params, a.layout, a.gate_bias, priority)
        except ValueError as error:
            assert "may need" in str(error)  # this pool could never hold it
            return
        self.kinds[request_id] = kind

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            collect(self.given, self.engine)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 4))
    def preempt(self, which: int) -> None:
        running = self.engine.scheduler.running
        self.engine.scheduler.preempt(running[which % len(running)])

    @precondition(lambda self: self.kinds)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        request_id = list(self.kinds)[which % len(self.kinds)]
        self.engine.abort(request_id)
        if request_id not in self.checked:
            del self.kinds[request_id]
            self.given.pop((request_id, 0), None)

    @invariant()
    def finished_requests_are_right_and_pages_are_whole(self) -> None:
        self.engine.check_integrity()
        for (request_id, _), given in self.given.items():
            if given.finish_reason is not None and request_id not in self.checked:
                self.checked.add(request_id)
                assert given.same_bits(expected(self.kinds[request_id]))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished():
                break
            collect(self.given, self.engine)
        assert not self.engine.has_unfinished(), "a request starved"
        self.finished_requests_are_right_and_pages_are_whole()
        assert self.checked == set(self.kinds)
        self.engine.clear_cache()
        assert self.engine.pool.free == self.engine.pool.num_pages and self.engine.pool.reserved == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_the_prompts_above_share_enough_to_hit():
    engine = small_engine(model(), reuse_generated=False)
    given: dict[tuple[int, int], Given] = {}
    for kind in range(KINDS):
        a = asked(kind)
        engine.add_request(a.prompt, a.params, a.layout, a.gate_bias)
        while engine.has_unfinished():
            collect(given, engine)
        assert given[kind, 0].same_bits(expected(kind))
    assert engine.stats()["cache_hits"] >= 4
