"""What the context cache is for: conversations, parting layouts, shared prompts in a queue, scores; and its limits."""

import random
from functools import cache

import pytest
import torch

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import Engine, RequestOutput, SamplingParams
from tests.runtime.serving import Asked, Given, asking, collect, prompt_of, run, small_engine
from tests.tiny import make_model

LAYERS = 4
MIXED = ("ssm", "attention", "ssm", "attention")
LAYOUTS = (None, "attention", "ssm", MIXED)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=["adaptive", "attention", "ssm", "mixed"])


@cache
def model() -> FlexHybridModel:
    return make_model(num_hidden_layers=LAYERS)


@cache
def cold(asked: Asked) -> Given:
    """The request in a fresh engine without a cache."""
    return run(small_engine(model(), context_cache=None), [asked])[0][0]


# --- conversations ----------------------------------------------------------------------------------------------------


@by_layout
def test_the_next_turn_starts_behind_the_answer(layout):
    engine, history, own = small_engine(model()), (), prompt_of(30, seed=1)
    for turn in range(4):
        prompt = (*history, *own)
        asked = asking(prompt, layout, new=12)
        given, output = run(engine, [asked])[0]
        theirs = cold(asked)
        assert given.token_ids == theirs.token_ids
        for mine, other in zip(given.logits, theirs.logits, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)
        if turn and layout is not None:
            assert output.cached_tokens >= len(history) - 1, "all but the answer's last token, which nobody computed"
            assert output.reused_layers == LAYERS
        history, own = (*prompt, *given.token_ids), prompt_of(5, seed=10 + turn)


@by_layout
def test_without_reuse_of_generated_tokens_a_conversation_has_the_bits_of_a_cold_one(layout):
    engine, prompt, length = small_engine(model(), reuse_generated=False), prompt_of(30, seed=2), 0
    for turn in range(3):
        asked = asking(prompt, layout, new=12)
        given, output = run(engine, [asked])[0]
        assert given.same_bits(cold(asked))
        assert not turn or layout != "attention" or output.cached_tokens == length
        length = len(prompt)
        prompt = (*prompt, *given.token_ids, *prompt_of(5, seed=20 + turn))
        assert engine.cache is not None and engine.cache.match(engine_tokens(prompt))[1] == length


def engine_tokens(prompt: tuple[int, ...]):
    return torch.tensor(prompt, dtype=torch.int32).numpy()


# --- what is kept, and how it is reused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"cache_entries": "paper"}, {"context_cache": "conventional"}, {"cache_bytes": 40 * 2048}],
    ids=["paper", "conventional", "short"],
)
def test_every_kind_of_cache_gives_the_same_bits(changes):
    rng = random.Random(5)
    engine = small_engine(model(), reuse_generated=False, **changes)
    shared = prompt_of(80, seed=3)
    for _ in range(30):
        own = tuple(rng.randrange(2, 258) for _ in range(rng.choice([0, 1, 9])))
        asked = asking((*shared[: rng.choice([20, 64, 80])], *own), rng.choice(LAYOUTS), 2)
        assert run(engine, [asked])[0][0].same_bits(cold(asked)), asked
    assert engine.stats()["cache_hits"] > 0 and engine.stats()["cache_saved_token_layers"] > 0


def test_paper_keeps_no_keys_and_values():
    engine = small_engine(model(), cache_entries="paper")
    for layout in LAYOUTS:
        run(engine, [asking(prompt_of(40, seed=4), layout)])
    kinds: set[str] = set()
    assert engine.cache is not None
    waiting = [engine.cache.root]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        kinds |= {entry.kind.value for here in node.root.subtree() for entry in here.entries()}
    assert kinds == {"state", "hidden"}


def test_a_layout_that_parts_at_layer_2_reuses_two_layers_or_none():
    prompt = prompt_of(65, seed=6)
    before, after = ("attention", "ssm", "ssm", "ssm"), ("attention", "ssm", "attention", "attention")
    saved = {}
    for mode in ("hybrid", "conventional"):
        engine = small_engine(model(), context_cache=mode)
        run(engine, [asking(prompt, before)])
        given, output = run(engine, [asking(prompt, after)])[0]
        assert given.same_bits(cold(asking(prompt, after)))
        saved[mode] = output.saved_token_layers
        assert output.reused_layers == (2 if mode == "hybrid" else 0)
        again = run(engine, [asking(prompt, after)])[0][1]
        assert again.saved_token_layers == 64 * LAYERS, "an equal layout is reused by both"
    # rows that rebuild what the other route needs count as computed, even those that pass a mixer alone
    assert 64 <= saved["hybrid"] <= 64 * 2 and saved["conventional"] == 0


def test_layers_below_the_parting_are_not_computed_again_at_any_depth():
    prompt, known = prompt_of(65, seed=7), ("attention", "ssm", "attention", "ssm")
    for depth in range(LAYERS):
        other = tuple(("ssm" if r == "attention" else "attention") if i >= depth else r for i, r in enumerate(known))
        engine = small_engine(model())
        run(engine, [asking(prompt, known)])
        given, output = run(engine, [asking(prompt, other)])[0]
        assert given.same_bits(cold(asking(prompt, other)))
        assert output.reused_layers == depth
        assert max(0, 64 * (depth - 1)) <= output.saved_token_layers <= 64 * depth


# --- requests that share what is being computed -----------------------------------------------------------------------


def computed(engine: Engine) -> int:
    assert engine.cache is not None
    return engine.cache.stats.computed_token_layers


@by_layout
def test_a_prefix_that_several_want_is_computed_once(layout):
    shared = prompt_of(60, seed=8)
    asked = [asking((*shared, last), layout, new=2) for last in range(2, 7)]
    engine = small_engine(model(), max_batched_tokens=40, decode_slowdown=None)
    for (given, _), mine in zip(run(engine, asked), asked, strict=True):
        assert given.same_bits(cold(mine))
    assert engine.cache is not None
    stats = engine.cache.stats
    if layout is not None:  # an adaptive one may choose another route and then has to compute what that one lacks
        assert stats.computed_token_layers - stats.replayed_token_layers == (61 + 4) * LAYERS
    assert stats.hits >= (4 if layout is not None else 0)


def test_who_waits_goes_on_when_the_first_is_aborted():
    shared = prompt_of(60, seed=9)
    asked = [asking((*shared, last), MIXED, new=2) for last in (2, 3)]
    engine = small_engine(model(), max_batched_tokens=20, decode_slowdown=None)
    first, second = (engine.add_request(a.prompt, a.params, a.layout) for a in asked)
    given: dict[tuple[int, int], Given] = {}
    for _ in range(3):
        collect(given, engine)
    assert [r.request_id for r in engine.scheduler.running] == [first], "the second waits"
    engine.abort(first)
    collect(given, engine)
    assert [r.request_id for r in engine.scheduler.running] == [second]
    while engine.has_unfinished():
        collect(given, engine)
    assert given[second, 0].same_bits(cold(asked[1]))
    assert computed(engine) == 61 * LAYERS


@pytest.mark.parametrize("other", ["another route", "little shared", "all there"])
def test_nobody_waits_in_vain(other):
    shared = prompt_of(60, seed=11)
    engine = small_engine(model(), max_batched_tokens=20, decode_slowdown=None)
    if other == "all there":
        run(engine, [asking(shared, "ssm", new=1)])
    second = {
        "another route": asking((*shared, 3), "attention"),
        "little shared": asking((*shared[:15], *prompt_of(40, seed=12)), "ssm"),
        "all there": asking((*shared, 3), "ssm"),
    }[other]
    engine.add_request((*shared, 2), SamplingParams(max_new_tokens=1), "ssm")
    engine.add_request(second.prompt, second.params, second.layout)
    engine.step()
    assert engine.stats()["waiting"] == 0


# --- scores, counters, limits -----------------------------------------------------------------------------------------


@by_layout
def test_a_score_hits_and_has_the_same_bits(layout, monkeypatch):
    prompt = prompt_of(40, seed=13)
    engine = small_engine(model())
    run(engine, [asking(prompt, layout)])
    start_prefill, started = engine.executor.start_prefill, []
    monkeypatch.setattr(
        engine.executor, "start_prefill", lambda *arguments: started.append(start_prefill(*arguments)) or started[-1]
    )
    for seed, length in ((14, 9), (15, 1), (16, 30)):
        answer = prompt_of(length, seed=seed)
        expected = small_engine(model(), context_cache=None).score(prompt, answer, layout)
        assert engine.score(prompt, answer, layout) == expected
        assert (started[-1].lowest == 39).all() and started[-1].reused_layers == LAYERS, (
            "all but the prompt's last token"
        )
    assert len(started) == 3
    assert run(engine, [asking(prompt, layout)])[0][0].same_bits(cold(asking(prompt, layout)))


def test_counters_add_up():
    engine, rng, shared = small_engine(model(), reuse_generated=False), random.Random(6), prompt_of(90, seed=16)
    outputs: list[RequestOutput] = []
    for _ in range(20):
        outputs.append(run(engine, [asking(shared[: rng.randint(1, 90)], rng.choice(LAYOUTS), 1)])[0][1])
    stats = engine.stats()
    assert engine.cache is not None
    assert stats["cache_lookups"] == 20
    assert stats["cache_hits"] == sum(o.reused_layers > 0 for o in outputs) > 5
    assert stats["cached_tokens"] == sum(o.cached_tokens for o in outputs) > 0
    assert stats["cache_looked_up_token_layers"] == sum(o.prompt_tokens for o in outputs) * LAYERS
    assert stats["cache_saved_token_layers"] == sum(o.saved_token_layers for o in outputs) > 0
    assert stats["cache_saved_token_layers"] + computed(engine) == stats["cache_looked_up_token_layers"]
    assert stats["cache_hit_rate"] == stats["cache_saved_token_layers"] / stats["cache_looked_up_token_layers"]
    assert 0 <= stats["cache_replayed_token_layers"] <= computed(engine)
    assert stats["pages_cached"] == engine.cache.num_pages == stats["pages"] - stats["pages_free"]
    engine.clear_cache()
    assert engine.stats()["pages_cached"] == 0 and sum(engine.stats()["cache_evictions"].values()) > 0


def test_without_a_cache_there_are_no_counters_of_it():
    engine = small_engine(model(), context_cache=None)
    run(engine, [asking(prompt_of(5))])
    assert not [key for key in engine.stats() if "cache" in key]
    engine.clear_cache()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entries", ["auto", "paper"])
@pytest.mark.parametrize("pages", [1, 7, None])
def test_clear_leaves_nothing(layout, entries, pages):
    changes = {} if pages is None else {"cache_bytes": pages * 2048}
    if pages == 1:
        with pytest.warns(UserWarning, match="can never hit"):
            engine = small_engine(model(), cache_entries=entries, **changes)
    else:
        engine = small_engine(model(), cache_entries=entries, **changes)
    assert engine.cache is not None
    for i in range(5):
        run(engine, [asking(prompt_of(40, seed=i), layout)])
        assert len(engine.cache.root.children) <= (engine.cache.num_pages or 0), "no node without pages"
    engine.clear_cache()
    assert not engine.cache.root.children and not engine.cache.root.root.children


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_cache": "radix"}, ("context_cache='radix'", "hybrid", "conventional", "None")),
        ({"cache_entries": "all"}, ("cache_entries='all'", "auto", "paper")),
        ({"cache_bytes": 0}, ("cache_bytes=0", "positive", "context_cache=None")),
        ({"cache_bytes": -5}, ("cache_bytes=-5", "positive")),
        ({"context_cache": "conventional", "cache_entries": "paper"}, ("'paper'", "'conventional'")),
    ],
)
def test_unknown_settings_name_the_value_and_the_remedy(changes, words):
    with pytest.raises(ValueError) as error:
        EngineConfig(**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_a_cache_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match=r"cache_bytes=2097152 is larger than the page pool, 1048576 bytes.*memory_b"):
        small_engine(model(), memory_bytes=1 << 20, cache_bytes=1 << 21)
    small_engine(model(), memory_bytes=1 << 20, cache_bytes=1 << 20)


def test_a_cache_too_small_for_a_state_says_so_and_harms_nobody():
    with pytest.warns(UserWarning, match=r"cache_bytes=2048 holds no SSM state .6144 bytes.*can never hit"):
        engine = small_engine(model(), cache_bytes=2048)
    for layout in LAYOUTS:
        asked = asking(prompt_of(40, seed=17), layout)
        for _ in range(2):
            assert run(engine, [asked])[0][0].same_bits(cold(asked))
            assert engine.stats()["pages_cached"] <= 1


@pytest.mark.parametrize("mode", ["hybrid", "conventional"])
def test_conventional_drops_the_oldest_context_whole_and_hybrid_does_not(mode):
    engine = small_engine(model(), context_cache=mode, cache_bytes=28 * 2048)
    prompts = [prompt_of(40, seed=50 + i) for i in range(6)]
    for prompt in prompts:  # of each 6 pages of KV, and at least as many of states
        run(engine, [asking(prompt, MIXED, new=1)])
    saved = [run(engine, [asking(prompt, MIXED, new=1)])[0][1].saved_token_layers for prompt in prompts[::-1]]
    assert saved[0] == 39 * LAYERS, "the newest is there whole"
    if mode == "conventional":
        assert set(saved) == {39 * LAYERS, 0}, "a context is there or it is not"
        assert saved == sorted(saved, reverse=True), "the oldest went first"
