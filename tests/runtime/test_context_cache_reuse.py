"""Reuse of cached prefixes: it happens, at any token and layout, and no bit of any answer depends on it."""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from flexops import FlexHybridModel
from flexops.kernels import ATTENTION, SSM
from flexops.runtime import Engine, RequestOutput, SamplingParams
from flexops.runtime.context_cache import ContextNode, Entry, Kind, RouteNode
from tests.runtime.serving import Asked, Given, asking, collect, prompt_of, run, small_engine
from tests.tiny import make_model

LAYERS, PAGE = 4, 16
NAMES = {ATTENTION: "attention", SSM: "ssm"}
MIXED = ("ssm", "attention", "ssm", "attention")
LAYOUTS = (None, "attention", "ssm", MIXED)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=["adaptive", "attention", "ssm", "mixed"])


@cache
def model_of(dtype: torch.dtype = torch.float32) -> FlexHybridModel:
    return make_model(layers_without_ffn=[1], num_hidden_layers=LAYERS, max_position_embeddings=4096).to(dtype)


@cache
def cold(asked: Asked, dtype: torch.dtype = torch.float32) -> tuple[Given, RequestOutput]:
    """The request in a fresh engine without a cache."""
    return run(small_engine(model_of(dtype), context_cache=None), [asked])[0]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def counted(engine: Engine) -> np.ndarray:
    """Token-layers looked up, computed, and replayed so far."""
    assert engine.cache is not None
    stats = engine.cache.stats
    return np.array([stats.looked_up_token_layers, stats.computed_token_layers, stats.replayed_token_layers])


def places(engine: Engine) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], ContextNode, RouteNode]]:
    """Every trie node of the cache: the tokens to its end, the routes below it, and both its nodes."""
    assert engine.cache is not None
    waiting = list(engine.cache.root.children.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        tokens = tuple(int(token) for part in node.path() for token in part.tokens)
        for here in node.root.subtree():
            routes = tuple(n.route for n in (here, *here.above()) if n.parent is not None)[::-1]
            yield tokens, routes, node, here


def entries_of(engine: Engine) -> list[Entry]:
    return [entry for *_, here in places(engine) for entry in here.entries()]


# --- hits, at any token -----------------------------------------------------------------------------------------------


@by_layout
@pytest.mark.parametrize("length", [2, 63, 64, 65, 128])
def test_the_same_prompt_again_computes_one_token(dtype, length, layout):
    engine, asked = small_engine(model_of(dtype)), asking(prompt_of(length), layout)
    given, first = run(engine, [asked])[0]
    assert given.same_bits(cold(asked, dtype)[0])
    assert (first.cached_tokens, first.reused_layers, first.saved_token_layers) == (0, 0, 0)
    before = counted(engine)
    given, again = run(engine, [asked])[0]
    assert given.same_bits(cold(asked, dtype)[0])
    assert (again.cached_tokens, again.reused_layers) == (length - 1, LAYERS)
    assert again.saved_token_layers == (length - 1) * LAYERS
    assert (counted(engine) - before).tolist() == [length * LAYERS, LAYERS, 0]


@by_layout
def test_prompts_shorter_than_a_page_hit_too(layout):
    engine = small_engine(model_of(), reuse_generated=False)
    for length in range(1, PAGE + 2):
        asked = asking(prompt_of(length, seed=length), layout, new=2)
        for sighting in range(2):
            given, output = run(engine, [asked])[0]
            assert output.cached_tokens == (length - 1 if sighting else 0)
            assert given.same_bits(cold(asked)[0]), length


@by_layout
def test_a_shared_prefix_of_any_length_passes_no_layer_again(layout):
    known, rng = prompt_of(300), random.Random(1)
    engine = small_engine(model_of(), reuse_generated=False)
    run(engine, [asking(known, layout)])
    cuts = [*range(1, 301, 23), 15, 16, 17, 63, 64, 65, 128, 299, 300]
    rng.shuffle(cuts)
    for cut in cuts:
        asked = asking((*known[:cut], 1), layout, new=1)
        before = counted(engine)
        given, output = run(engine, [asked])[0]
        looked_up, computed, replayed = counted(engine) - before
        assert (looked_up, computed - replayed) == ((cut + 1) * LAYERS, LAYERS), f"{cut} shared tokens"
        assert given.same_bits(cold(asked)[0]), f"{cut} shared tokens"
        if layout == "attention" or (layout is not None and cut >= 64):  # states are kept at halves of the prompt
            assert output.reused_layers == LAYERS, f"{cut} shared tokens"


@pytest.mark.slow
@by_layout
@pytest.mark.parametrize("length", range(1, 301, 7))
def test_every_shared_prefix_of_every_length_passes_no_layer_again(layout, length):
    known = prompt_of(length, seed=length)
    for cut in range(1, length + 1):
        engine = small_engine(model_of(), reuse_generated=False, memory_bytes=1 << 21)
        run(engine, [asking(known, layout, new=1)])
        before = counted(engine)
        given = run(engine, [asked := asking((*known[:cut], 1), layout, new=1)])[0][0]
        looked_up, computed, replayed = counted(engine) - before
        assert (looked_up, computed - replayed) == ((cut + 1) * LAYERS, LAYERS), cut
        if cut % 10 == 0:
            assert given.same_bits(cold(asked)[0]), cut


@by_layout
def test_a_long_shared_prefix_hits_behind_a_long_prompt(layout):
    shared = prompt_of(1500, seed=3)
    engine = small_engine(model_of())
    run(engine, [asking((*shared, *prompt_of(700, seed=4)), layout, new=1)])
    asked = asking((*shared, *prompt_of(700, seed=5)), layout, new=1)
    before = counted(engine)
    given, output = run(engine, [asked])[0]
    looked_up, computed, replayed = counted(engine) - before
    assert looked_up == 2200 * LAYERS and computed - replayed == 700 * LAYERS
    assert output.saved_token_layers == looked_up - computed > 0
    assert engine.stats()["cache_hits"] == 1
    if layout is not None:
        assert output.reused_layers == LAYERS
    assert given.same_bits(cold(asked)[0])


# --- the same bits ----------------------------------------------------------------------------------------------------


def family(seed: int, count: int, longest: int = 90) -> list[Asked]:
    """Prompts that share prefixes of any length, under layouts that part at any layer."""
    rng = random.Random(seed)
    roots = [prompt_of(longest, seed=seed + i) for i in range(2)]
    layouts = [*LAYOUTS, ("ssm", "attention", "attention", "ssm"), ("adaptive", "ssm", "adaptive", "attention")]
    asked = []
    for _ in range(count):
        own = tuple(rng.randrange(2, 258) for _ in range(rng.choice([0, 1, 2, 3, 20])))
        prompt = (*rng.choice(roots)[: rng.randint(1, longest)], *own)
        asked.append(asking(prompt, rng.choice(layouts), rng.randint(1, 4), rng.choice([0.0, 0.0, 0.7, -0.7])))
    return asked


@pytest.mark.parametrize("budget", [7, 50, 32768])
def test_warm_equals_cold(dtype, budget):
    engine = small_engine(
        model_of(dtype), max_batched_tokens=budget, decode_slowdown=None, reuse_generated=False, max_num_requests=3
    )
    asked = family(seed=budget, count=20)
    for i in range(0, len(asked), 4):
        for (given, _), mine in zip(run(engine, asked[i : i + 4]), asked[i : i + 4], strict=True):
            assert given.same_bits(cold(mine, dtype)[0]), mine
    stats = engine.stats()
    assert stats["cache_hits"] >= 8 and stats["cache_replayed_token_layers"] > 0


@by_layout
def test_two_prompts_that_part_at_their_last_token_in_one_step(layout):
    for shared in (3, 40):  # too short to wait for, and long enough
        engine = small_engine(model_of())
        prefix = prompt_of(shared, seed=shared)
        asked = [asking((*prefix, last), layout) for last in (7, 8, 9)]
        for (given, _), mine in zip(run(engine, asked[:2]), asked[:2], strict=True):
            assert given.same_bits(cold(mine)[0])
        given, third = run(engine, asked[2:])[0]
        assert given.same_bits(cold(asked[2])[0]) and third.reused_layers == LAYERS


@by_layout
def test_a_short_suffix_leaves_what_it_starts_from_as_it_was(dtype, layout):
    prefix = prompt_of(37, seed=8)
    for length in (37, 36, 32):  # behind the last token, at a state, at a page's end
        engine = small_engine(model_of(dtype))
        run(engine, [asking(prefix, layout)])
        for suffix in (1, 2, 3):
            before = {e: engine.pool.memory[torch.from_numpy(e.pages).long()] for e in entries_of(engine)}
            spans = {e: (e.start, e.end) for e in before}
            asked = asking((*prefix[:length], *range(200, 200 + suffix)), layout)
            given, output = run(engine, [asked])[0]
            assert output.reused_layers == LAYERS or layout is None or length == 32
            assert given.same_bits(cold(asked, dtype)[0])
            kept = [e for e in entries_of(engine) if e in before]
            assert any(e.kind is Kind.STATE for e in kept) or layout == "attention"
            for entry in kept:
                if (entry.start, entry.end) == spans[entry] or entry.kind is Kind.STATE:
                    now = engine.pool.memory[torch.from_numpy(entry.pages).long()]
                    assert torch.equal(now, before[entry]), entry.kind


def test_gate_margins_are_those_of_the_whole_prompt(dtype):
    shared, hits = prompt_of(60, seed=12), 0
    engine = small_engine(model_of(dtype), reuse_generated=False)
    for i, bias in enumerate((0.0, 0.5, -0.5, 0.0, 0.2)):
        asked = asking((*shared[: 60 - 5 * i], *prompt_of(1 + 3 * i, seed=i)), None, 1, bias)
        given, output = run(engine, [asked])[0]
        theirs = cold(asked, dtype)[1]
        assert output.gate_margins == theirs.gate_margins and output.layout == theirs.layout
        assert given.same_bits(cold(asked, dtype)[0])
        hits += output.saved_token_layers > 0
    assert hits >= 3


@pytest.mark.parametrize("cut", [33, 34])  # a token before the state that the prompt left, and there
@pytest.mark.parametrize("layout", [None, "ssm", MIXED], ids=["adaptive", "ssm", "mixed"])
@pytest.mark.parametrize("entries", ["auto", "paper"])
def test_without_any_one_entry_the_bits_are_the_same(layout, entries, cut):
    shared = prompt_of(35, seed=20)
    asked = asking((*shared[:cut], 5, 6), layout)
    number, saved = 0, set()
    while True:
        engine = small_engine(model_of(), memory_bytes=1 << 20, cache_entries=entries, reuse_generated=False)
        run(engine, [asking(shared, layout)])
        found = entries_of(engine)
        if number == len(found):
            break
        assert engine.cache is not None
        engine.cache._drop(found[number])
        engine.check_integrity()
        given, output = run(engine, [asked])[0]
        assert given.same_bits(cold(asked)[0]), found[number]
        saved.add(output.saved_token_layers)
        number += 1
    assert number >= 5
    if cut == 34 and layout is not None:
        assert len(saved) > 1 and max(saved) >= 34, "they were of use"


def test_without_any_two_entries_the_bits_are_the_same():
    shared = prompt_of(20, seed=21)
    asked = asking((*shared[:18], 5, 6), MIXED)
    engine = small_engine(model_of(), memory_bytes=1 << 20)
    run(engine, [asking(shared, MIXED, new=1)])
    number = len(entries_of(engine))
    for first in range(number):
        for second in range(first):
            engine = small_engine(model_of(), memory_bytes=1 << 20)
            run(engine, [asking(shared, MIXED, new=1)])
            found = entries_of(engine)
            assert engine.cache is not None
            for entry in (found[first], found[second]):
                engine.cache._drop(entry)
            assert run(engine, [asked])[0][0].same_bits(cold(asked)[0]), (found[first], found[second])


# --- what is stored ---------------------------------------------------------------------------------------------------


@cache
def recomputed(prompt: tuple[int, ...], routes: tuple[int, ...]) -> tuple[dict, dict, dict, dict]:
    """From nothing and without a cache, by layer: inputs, gate rows, keys and values, state with conv window."""
    engine = small_engine(model_of(), context_cache=None, max_batched_tokens=len(prompt), decode_slowdown=None)
    request_id = engine.add_request(prompt, SamplingParams(max_new_tokens=2), [NAMES[route] for route in routes])
    request, executor, pool = engine._requests[request_id, 0], engine.executor, engine.pool
    hidden: dict[int, Tensor] = {}
    for layer_idx in range(LAYERS):  # the budget carries the prompt through one layer per step
        engine.step()
        if layer_idx + 1 < LAYERS:
            hidden[layer_idx + 1] = request.progress.hidden.clone()
    hidden[0] = executor.model.embedding[list(prompt)]
    gates, kv, states = {}, {}, {}
    for layer_idx, layer in enumerate(executor.model.layers):
        rows, slot = hidden[layer_idx].clone(), request.slot
        gates[layer_idx] = executor.ops.gate_pool(rows, None, layer.input_norm, executor.model.eps, layer.gate.w1)[1]
        if routes[layer_idx] == ATTENTION:
            pages = engine.tables.kv_pages[layer_idx, slot]
            kv[layer_idx] = stored_kv(engine, pages[pages >= 0])[: len(prompt)]
        else:
            windows = pool.conv_cache[engine.tables.conv_pages[layer_idx, slot]]
            states[layer_idx] = pool.state_cache[engine.tables.state_pages[layer_idx, slot]].clone(), windows.clone()
    return hidden, gates, kv, states


def stored_kv(engine: Engine, pages: np.ndarray) -> Tensor:
    """[tokens, 2, num_kv_heads, head_dim] of some pages."""
    return engine.pool.kv_cache[torch.from_numpy(pages).long()].permute(0, 3, 1, 2, 4).flatten(0, 1)


def test_every_entry_equals_a_recomputation_from_scratch():
    engine = small_engine(
        model_of(), max_batched_tokens=60, decode_slowdown=None, reuse_generated=False, max_num_requests=3
    )
    asked = family(seed=40, count=24, longest=70)
    for i in range(0, len(asked), 4):
        run(engine, asked[i : i + 4])
    assert engine.stats()["cache_replayed_token_layers"] > 0
    check_entries(engine)


def check_entries(engine: Engine) -> None:
    """Compare everything the cache holds, bit for bit, with what its tokens and routes give from nothing."""
    layout, pool, checked = engine.pool.layout, engine.pool, {"gate": 0, **{kind.value: 0 for kind in Kind}}
    for tokens, routes, node, here in places(engine):
        whole = (*routes, *[SSM] * (LAYERS - len(routes)))
        hidden, gates, kv, _ = recomputed(tokens, whole)
        span = slice(node.start, node.end)
        if here.gate is not None:
            assert torch.equal(here.gate, gates[len(routes)][span]), "gate rows"
            checked["gate"] += 1
        for entry in here.entries():
            pages, rows = torch.from_numpy(entry.pages).long(), slice(entry.start % PAGE, None)
            num_rows = entry.end - entry.start
            if entry.kind is Kind.HIDDEN:
                stored = pool.hidden_cache[pages].flatten(0, 1)[rows][:num_rows]
                assert torch.equal(stored, hidden[len(routes)][entry.start : entry.end]), "inputs of a layer"
            elif entry.kind is Kind.KV:
                stored = stored_kv(engine, entry.pages)[rows][:num_rows]
                assert torch.equal(stored, kv[len(routes) - 1][entry.start : entry.end]), "keys and values"
            else:
                state, windows = recomputed(tokens[: entry.end], whole)[3][len(routes) - 1]
                assert torch.equal(pool.state_cache[pages[: layout.state_pages]], state), "a state"
                ring = [p % windows.shape[1] for p in range(max(0, entry.end - 3), entry.end)]
                stored = pool.conv_cache[pages[layout.state_pages :]]
                assert torch.equal(stored[:, ring], windows[:, ring]), "a conv window"
            checked[entry.kind.value] += 1
    assert min(checked.values()) >= 10, checked


# --- a request's life -------------------------------------------------------------------------------------------------


@by_layout
def test_abort_at_any_point_returns_everything(layout):
    shared = prompt_of(50, seed=30)
    first = asking(shared, MIXED, new=1)
    asked = asking((*shared[:41], *prompt_of(9, seed=31)), layout, new=3)
    stop_at, whole = 0, False
    while not whole:
        engine = small_engine(model_of(), max_batched_tokens=24, decode_slowdown=None, memory_bytes=1 << 20)
        run(engine, [first])
        assert engine.cache is not None
        cached = engine.cache.num_pages
        request_id = engine.add_request(asked.prompt, asked.params, asked.layout)
        for _ in range(stop_at):
            engine.step()
        whole = not engine.has_unfinished()
        engine.abort(request_id)
        engine.check_integrity()
        assert engine.pool.num_pages - engine.pool.free == engine.cache.num_pages >= cached
        assert engine.pool.reserved == 0
        assert all(node.pins == 0 for _, _, node, _ in places(engine))
        given = run(engine, [asked])[0][0]
        assert given.same_bits(cold(asked)[0]), f"after an abort at step {stop_at}"
        engine.clear_cache()
        assert engine.pool.free == engine.pool.num_pages
        stop_at += 1
    assert stop_at > 4, "a life of several steps"


def test_as_many_requests_as_slots():
    shared = prompt_of(48, seed=33)
    asked = [asking((*shared[: 20 + 4 * i], i + 2), ("ssm", None, MIXED)[i % 3], new=6) for i in range(7)]
    engine = small_engine(model_of(), max_num_requests=2, reuse_generated=False)
    most = 0
    ids = [engine.add_request(a.prompt, a.params, a.layout) for a in asked]
    given: dict[tuple[int, int], Given] = {}
    while engine.has_unfinished():
        collect(given, engine)
        most = max(most, len(engine.scheduler.running))
    assert most == 2 and engine.stats()["cache_hits"] > 0
    assert all(given[i, 0].same_bits(cold(a)[0]) for i, a in zip(ids, asked, strict=True))


@by_layout
def test_a_full_cache_keeps_the_prefix_that_a_long_prompt_has_just_matched(layout):
    shared = prompt_of(48, seed=35)
    engine = small_engine(model_of(), memory_bytes=120 * 2048, reuse_generated=False)
    assert engine.cache is not None
    for i in range(12):  # older prompts fill the pool
        run(engine, [asking(prompt_of(60, seed=100 + i), layout, new=1)])
    run(engine, [asking(shared, layout, new=1)] * 3)
    assert sum(engine.cache.stats.evictions.values()) > 0
    asked = asking((*shared, *prompt_of(200, seed=36)), layout, new=1)
    before = sum(engine.cache.stats.evictions.values())
    given, output = run(engine, [asked])[0]
    assert given.same_bits(cold(asked)[0])
    assert sum(engine.cache.stats.evictions.values()) > before, "the long prompt needed room"
    assert output.reused_layers > 0


@by_layout
def test_identical_prompts_at_once_then_churn(layout):
    engine = small_engine(model_of(), memory_bytes=100 * 2048, max_num_requests=4)
    twin = asking(prompt_of(40, seed=37), layout, new=12)
    for (given, _), mine in zip(run(engine, [twin, twin]), [twin, twin], strict=True):
        assert given.same_bits(cold(mine)[0])
    for i in range(8):
        asked = [twin, asking(prompt_of(55, seed=200 + i), layout, new=2), twin]
        for (given, _), mine in zip(run(engine, asked), asked, strict=True):
            assert given.same_bits(cold(mine)[0])
    assert sum(engine.stats()["cache_evictions"].values()) > 0 and engine.stats()["cache_hits"] > 8


@by_layout
def test_samples_report_what_their_prompt_reused(layout):
    prompt = prompt_of(40, seed=38)
    engine = small_engine(model_of())
    run(engine, [asking(prompt, layout, new=1)])
    params = SamplingParams(max_new_tokens=1, n=4, temperature=1.0, seed=5)
    outputs: list[RequestOutput] = []
    engine.add_request(prompt, params, layout)
    while engine.has_unfinished():
        outputs += engine.step()
    assert [o.sample for o in outputs] == [0, 1, 2, 3]
    assert [o.cached_tokens for o in outputs] == [39] * 4
    assert [o.saved_token_layers for o in outputs] == [39 * LAYERS] * 4
    assert engine.stats()["cached_tokens"] == 39, "one prompt was looked up"
