"""5,000 requests through a pool of a tenth of their demand: every one right, nothing leaks (`make test-slow`)."""

import random

import pytest

from flexops.runtime import SamplingParams
from tests.runtime.serving import Asked, Given, alone, collect, small_engine
from tests.tiny import make_model

REQUESTS, KINDS, CONCURRENT = 5000, 80, 64


@pytest.mark.slow
def test_soak():
    model, rng = make_model(num_hidden_layers=3), random.Random(0)
    asked = [
        Asked(
            tuple(rng.randrange(258) for _ in range(rng.randint(1, 20))),
            SamplingParams(max_new_tokens=rng.choice([2, 5, 10, 60]), temperature=rng.choice([0.0, 1.0]), seed=i),
            rng.choice([None, "attention", "attention", "ssm"]),
        )
        for i in range(KINDS)
    ]
    expected = [alone(model, a) for a in asked]
    tables = small_engine(model).tables
    pages = [tables.pages_for_all([-1] * 3, len(a.prompt) + a.params.max_new_tokens) for a in asked]
    demand = sum(pages) / KINDS * CONCURRENT
    memory = max(max(pages), int(demand / 10)) * tables.layout.page_bytes
    engine = small_engine(model, memory_bytes=memory, max_num_requests=CONCURRENT, max_batched_tokens=300)

    kinds: dict[int, int] = {}
    given: dict[tuple[int, int], Given] = {}
    aborted = checked = added = 0
    while added < REQUESTS or engine.has_unfinished():
        while added < REQUESTS and len(engine.scheduler.waiting) < CONCURRENT:
            kind = rng.randrange(KINDS)
            a = asked[kind]
            kinds[engine.add_request(a.prompt, a.params, a.layout, priority=rng.choice([0, 0, 1]))] = kind
            added += 1
        if rng.random() < 0.05 and kinds:
            victim = rng.choice(list(kinds))
            engine.abort(victim)
            del kinds[victim]
            given.pop((victim, 0), None)
            aborted += 1
        if rng.random() < 0.03 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        for output in collect(given, engine):
            if output.finished and output.request_id in kinds:
                result = given.pop((output.request_id, 0))
                assert result.same_bits(expected[kinds.pop(output.request_id)])
                checked += 1
    assert checked + aborted == REQUESTS
    assert engine.scheduler.preemptions > 100, "the pool was short"
    engine.clear_cache()
    assert engine.pool.free == engine.pool.num_pages and engine.pool.reserved == 0
    assert engine.tables.free_slots == CONCURRENT
