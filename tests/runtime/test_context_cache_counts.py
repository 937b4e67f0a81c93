"""What the context cache says of itself: its size, its hits, what it saved."""

import pytest

from flexops.runtime import SamplingParams
from flexops.runtime.cache_tree import Kind
from tests.runtime.serving import small_engine
from tests.tiny import make_model

ONE = SamplingParams(max_new_tokens=1)


@pytest.mark.parametrize("mode", ["hybrid", "conventional"])
def test_cache_bytes_is_never_exceeded_after_a_step(mode: str) -> None:
    limit = 24 * 2048
    engine = small_engine(make_model(num_hidden_layers=4), cache_bytes=limit, context_cache=mode)
    prompt = [2 + i % 250 for i in range(100)]
    for layout in (["attention", "attention", "attention", "ssm"], ["ssm", "attention", "attention", "attention"]):
        engine.add_request(prompt, ONE, layout)
        while engine.has_unfinished():
            engine.step()
            stats = engine.stats()
            assert stats["pages_cached"] * stats["page_bytes"] <= limit
    assert engine.stats()["cache_evictions"]


def test_a_context_scored_twice_hits() -> None:
    engine = small_engine(make_model(num_hidden_layers=4))
    prompt = [2 + i % 250 for i in range(40)]
    engine.score(prompt, [5, 6, 7], "attention")
    engine.score(prompt, [8, 9], "attention")
    stats = engine.stats()
    assert stats["cache_lookups"] == 2 and stats["cache_hits"] == 1
    assert stats["cached_tokens"] == 39  # the row that gives the first score has to be computed


def test_rows_computed_twice_are_counted_as_repeated_and_never_as_less_than_nothing_saved() -> None:
    repeated = 0
    for number in range(3):  # one layer's rows are missing at a time
        engine = small_engine(make_model(num_hidden_layers=4), reuse_generated=False)
        assert engine.cache is not None
        prompt = [2 + (7 * i) % 250 for i in range(35)]
        engine.add_request(prompt, ONE, "ssm")
        while engine.has_unfinished():
            engine.step()
        nodes, rows = list(engine.cache.root.children.values()), []
        for node in nodes:
            nodes.extend(node.children.values())
            rows += [e for here in node.root.subtree() for e in here.entries() if e.kind is Kind.HIDDEN]
        engine.cache._drop(rows[number])
        engine.add_request([*prompt[:33], 5, 6], ONE, "ssm")
        while engine.has_unfinished():
            outputs = engine.step()
        stats = engine.stats()
        assert outputs[-1].saved_token_layers >= 0
        total = stats["cache_saved_token_layers"] + 35 * 4 + (35 * 4 - outputs[-1].saved_token_layers)
        assert total == stats["cache_looked_up_token_layers"] == 2 * 35 * 4
        repeated += stats["cache_repeated_token_layers"]
    assert repeated > 0


@pytest.mark.parametrize("eviction", ["value", "lru"])
def test_what_is_used_again_stays_under_both_policies(eviction: str) -> None:
    model = make_model(num_hidden_layers=4)
    prompts = [[2 + (k * 31 + i * (k + 1)) % 250 for i in range(48)] for k in range(6)]
    room = small_engine(model)
    room.add_request(prompts[0], ONE, "attention")
    while room.has_unfinished():
        room.step()
    limit = 3 * room.stats()["pages_cached"] * room.stats()["page_bytes"]
    engine = small_engine(model, cache_bytes=limit, cache_eviction=eviction, reuse_generated=False)
    saved = []
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2], prompts[0], prompts[3], prompts[0], prompts[4]):
        engine.add_request(prompt, ONE, "attention")
        while engine.has_unfinished():
            outputs = engine.step()
        saved.append(outputs[-1].saved_token_layers)
    assert saved[2::2] == [47 * 4] * 3, "the prompt in steady use was driven out by others"
    assert saved[1::2] == [0] * 4


def test_a_request_keeps_no_scratch_state_while_it_decodes() -> None:
    """A prefill behind a cached prefix may need one to compute rows again; its decodes do not."""
    engine = small_engine(make_model(num_hidden_layers=4), reuse_generated=False)
    prompt = [2 + i % 250 for i in range(40)]
    owned = []
    for _ in range(2):
        engine.add_request(prompt, SamplingParams(max_new_tokens=4), "ssm")
        engine.step()
        (request,) = engine.scheduler.running
        owned.append(len(engine.tables.owned(request.slot)))
        while engine.has_unfinished():
            engine.step()
    assert engine.stats()["cache_hits"] == 1
    assert owned == [4 * engine.pool.layout.entry_pages] * 2
