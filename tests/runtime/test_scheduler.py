"""The budget of prefill beside decodes, and what is counted when requests are preempted."""

import pytest

from flexops import EngineConfig
from flexops.runtime import SamplingParams
from flexops.runtime.scheduler import SliceBudget
from tests.runtime.serving import small_engine
from tests.tiny import make_model

SLICE_US, TOKEN_US, CONFIG = 40.0, 3.0, EngineConfig(max_batched_tokens=10_000, decode_slowdown=1.5)


def step_us(num_decodes: int, slices: int, token_layers: int) -> float:
    """What a step takes on a machine that the budget has to find out about."""
    decode_us = 1000.0 + 200.0 * num_decodes if num_decodes else 0.0
    return decode_us + SLICE_US * slices + TOKEN_US * token_layers


def run_step(budget: SliceBudget, num_decodes: int, waiting: list[int]) -> tuple[int, int]:
    """A step with slices of so many rows on offer: how many slices and token-layers it carried."""
    allowance = budget.allow(num_decodes)
    taken = [rows for rows in map(allowance.take, waiting) if rows]
    budget.observe(num_decodes, len(taken), sum(taken), step_us(num_decodes, len(taken), sum(taken)))
    return len(taken), sum(taken)


def test_without_decodes_and_without_a_limit_everything_is_allowed():
    assert SliceBudget(CONFIG).allow(0).take(20_000) == 10_000
    free = SliceBudget(EngineConfig(max_batched_tokens=77, decode_slowdown=None)).allow(5)
    assert [free.take(50), free.take(50), free.take(50)] == [50, 27, 0]


def test_a_slice_and_its_rows_are_told_apart():
    budget = SliceBudget(CONFIG)
    for slices, rows in ((1, 500), (12, 24), (3, 90), (12, 600)):
        budget.observe(0, slices, rows, step_us(0, slices, rows))
    assert budget.slice_us == pytest.approx(SLICE_US) and budget.token_us == pytest.approx(TOKEN_US)
    budget.observe(8, 0, 0, step_us(8, 0, 0))
    allowance = budget.allow(8)
    assert allowance.us == pytest.approx(0.5 * step_us(8, 0, 0))
    assert allowance.take(10_000) == pytest.approx((0.5 * step_us(8, 0, 0) - SLICE_US) / TOKEN_US, abs=1)
    assert allowance.take(10) == 0


@pytest.mark.parametrize("decodes", [1, 8, 64])
def test_prompts_that_never_cease_do_not_keep_the_budget_small(decodes):
    """No step has decodes alone: their time is found from mixed steps, and again when their number changes."""
    budget = SliceBudget(CONFIG)
    budget.observe(0, 1, 500, step_us(0, 1, 500))
    for running in (2, decodes):
        for i in range(40):
            slices, rows = run_step(budget, running, [7 + i % 5, 10_000])
    allowed = 0.5 * step_us(decodes, 0, 0)
    assert SLICE_US * slices + TOKEN_US * rows == pytest.approx(allowed, rel=0.1)


def test_a_prompt_always_advances():
    budget = SliceBudget(CONFIG)
    budget.observe(0, 1, 10, 1e9)  # a first step that compiled
    budget.observe(4, 0, 0, 100.0)
    allowance = budget.allow(4)
    assert [allowance.take(100), allowance.take(100)] == [SliceBudget.MIN_SLICE, 0]


def test_one_slow_step_is_forgotten():
    budget = SliceBudget(CONFIG)
    budget.observe(0, 1, 10, 1e9)
    for rows in (300, 20, 400):
        budget.observe(0, 2, rows, step_us(0, 2, rows))
    assert budget.token_us == pytest.approx(TOKEN_US, rel=0.05)


def test_a_prompt_preempted_in_its_prefill_is_counted_once():
    engine = small_engine(make_model(), max_batched_tokens=10)
    engine.add_request([1] * 30, SamplingParams(max_new_tokens=6))
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    while engine.has_unfinished():
        engine.step()
        if engine.metrics.generated_tokens == 3 and engine.scheduler.preemptions == 1:
            engine.scheduler.preempt(engine.scheduler.running[0])
    stats = engine.stats()
    assert stats["preemptions"] == 2
    assert stats["prompt_tokens"] == 30 and sum(stats["layouts"].values()) == 1
