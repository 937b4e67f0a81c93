"""The budget of prefill beside decodes, and what is counted when requests are preempted."""

import pytest

from flexops import EngineConfig
from flexops.runtime import SamplingParams
from flexops.runtime.scheduler import SliceBudget
from tests.runtime.serving import small_engine
from tests.tiny import make_model

TOKEN_LAYER_US, CONFIG = 3.0, EngineConfig(max_batched_tokens=10_000, decode_slowdown=1.5)


def step_us(num_decodes: int, token_layers: int) -> float:
    """What a step takes on a machine that the budget has to find out about."""
    return (1000.0 + 200.0 * num_decodes if num_decodes else 0.0) + TOKEN_LAYER_US * token_layers


def test_without_decodes_and_without_a_limit_everything_is_allowed():
    assert SliceBudget(CONFIG).allow(0) == 10_000
    assert SliceBudget(EngineConfig(max_batched_tokens=77, decode_slowdown=None)).allow(5) == 77


def test_a_known_machine_gets_what_the_slowdown_leaves():
    budget = SliceBudget(CONFIG)
    budget.observe(0, 500, step_us(0, 500))
    budget.observe(8, 0, step_us(8, 0))
    assert budget.allow(8) == int(0.5 * step_us(8, 0) / TOKEN_LAYER_US)


@pytest.mark.parametrize("decodes", [1, 8, 64])
def test_prompts_that_never_cease_do_not_keep_the_budget_small(decodes):
    """No step has decodes alone: their time is found from mixed steps, and again when their number changes."""
    budget = SliceBudget(CONFIG)
    budget.observe(0, 500, step_us(0, 500))
    for running in (2, decodes):
        for _ in range(30):
            allowed = budget.allow(running)
            budget.observe(running, allowed, step_us(running, allowed))
    expected = 0.5 * step_us(decodes, 0) / TOKEN_LAYER_US
    assert budget.allow(decodes) == pytest.approx(expected, rel=0.05)


def test_a_prompt_always_advances():
    budget = SliceBudget(CONFIG)
    budget.observe(0, 10, 1e9)  # a first step that compiled
    budget.observe(4, 0, 100.0)
    assert budget.allow(4) == SliceBudget.MIN_SLICE


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
