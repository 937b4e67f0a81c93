"""The context cache's tree by itself: matching, cutting, pages and their counts, pins, eviction, and what goes away."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flexops import FlexHybridModel
from flexops.kernels import ATTENTION, SSM
from flexops.runtime.context_cache import Captures, ContextCache, ContextNode, Entry, Kind, common_prefix
from flexops.runtime.eviction import HALF_LIFE
from flexops.runtime.profiling import FFN, PART_NAMES, BranchLoad, BranchProfile, profile_key, terms
from tests.runtime.serving import random_requests, serve, small_engine
from tests.tiny import make_model

LAYERS, PAGE, GATE_DIM = 3, 16, 16  # PAGE: tokens of a page of KV, and of layer inputs
BOTH = (ATTENTION, SSM, ATTENTION)


@cache
def model() -> FlexHybridModel:
    return make_model(num_hidden_layers=LAYERS)


def small_cache(**changes: object) -> ContextCache:
    made = small_engine(model(), **changes).cache
    assert made is not None and made.pool.layout.hidden_tokens == made.pool.layout.page_tokens == PAGE
    return made


def tokens_of(*parts: Sequence[int]) -> np.ndarray:
    return np.array([token for part in parts for token in part], dtype=np.int32)


def store(
    kept: ContextCache,
    tokens: np.ndarray,
    routes: Sequence[int] = BOTH,
    states: Sequence[int] | None = None,
    hidden: Sequence[int] = (),
) -> ContextNode:
    """Publish as a prefill that has computed everything: KV, states after `states` tokens, inputs of layers."""
    num_tokens, layout, pool = len(tokens), kept.pool.layout, kept.pool
    states = [num_tokens] if states is None else states
    columns = layout.kv_pages(num_tokens)
    kv = np.full((len(routes), columns), -1, dtype=np.int32)
    captures = Captures()
    kept.register(captures)
    for layer_idx, route in enumerate(routes):
        if route == ATTENTION:
            kv[layer_idx] = pool.allocate(columns)
            continue
        captures.states[layer_idx] = {}
        for position in states:
            pages = kept.acquire(layer_idx, layout.entry_pages, 1e9)
            assert pages is not None
            captures.states[layer_idx][position] = pages
    for layer_idx in hidden:
        pages = kept.acquire(layer_idx, columns, 1.0)
        assert pages is not None
        captures.hidden[layer_idx] = (0, num_tokens, pages)
    gates = {0: torch.arange(num_tokens * GATE_DIM, dtype=torch.float32).view(num_tokens, GATE_DIM)}
    kept.clock += 1
    node = kept.insert(tokens)
    kept.pin(node)
    kept.publish(node, routes, kv, gates, captures, kept.clock, matched=num_tokens)
    kept.discard(captures)
    pool.release([int(page) for page in kv[kv >= 0]])
    kept.unpin(node)
    kept.check_integrity()
    pool.check_integrity(kept.owned())
    return node


def nodes_of(kept: ContextCache) -> list[ContextNode]:
    """All nodes but the root."""
    found, waiting = [], list(kept.root.children.values())
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting.extend(node.children.values())
    return found


def entries_of(kept: ContextCache) -> list[Entry]:
    return [entry for node in nodes_of(kept) for here in node.root.subtree() for entry in here.entries()]


def assert_whole(kept: ContextCache) -> None:
    kept.check_integrity()
    kept.pool.check_integrity(kept.owned())


def test_common_prefix() -> None:
    a = np.array([1, 2, 3], dtype=np.int32)
    assert [common_prefix(a, np.array(b, dtype=np.int32)) for b in ([], [2], [1], [1, 2, 4, 5], [1, 2, 3, 4])] == [
        0,
        0,
        1,
        2,
        3,
    ]


# --- matching and cutting ---------------------------------------------------------------------------------------------


def test_match_finds_the_longest_prefix_token_by_token() -> None:
    kept = small_cache()
    rng = random.Random(0)
    known = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(25)]
    for prompt in known:
        store(kept, tokens_of(prompt))
    for _ in range(200):
        asked = [rng.randrange(3) for _ in range(rng.randint(0, 30))]
        best = max(common_prefix(tokens_of(asked), tokens_of(prompt)) for prompt in known)
        node, length = kept.match(tokens_of(asked))
        assert length == best and node.end == length
        assert [t for part in node.path() for t in part.tokens.tolist()] == asked[:length]
        kept.check_integrity()


def test_two_prompts_of_one_hash_are_two_prompts() -> None:
    kept = small_cache()
    store(kept, tokens_of([1, 2, 3, 4]))
    # a sum, an exclusive or, a set, and the bytes in another order are all equal here
    for other in ([4, 3, 2, 1], [2, 1, 4, 3], [1, 3, 2, 4]):
        _, length = kept.match(tokens_of(other))
        assert length == common_prefix(tokens_of(other), tokens_of([1, 2, 3, 4]))


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 32, 33, 39])
def test_a_cut_shares_the_page_that_holds_rows_of_both_parts(cut: int) -> None:
    kept = small_cache()
    prompt = list(range(40))
    lower = store(kept, tokens_of(prompt), BOTH, states=[cut, 40] if cut < 40 else [40], hidden=[1, 2])
    kv, hidden = lower.root.children[ATTENTION].kv, lower.root.children[ATTENTION].hidden
    assert kv is not None and hidden is not None
    whole = {Kind.KV: kv.pages.tolist(), Kind.HIDDEN: hidden.pages.tolist()}
    gate = lower.root.gate
    assert gate is not None
    before = kept.num_pages
    upper, length = kept.match(tokens_of(prompt[:cut], [999]))
    assert length == cut and (upper.start, upper.end, lower.start, lower.end) == (0, cut, cut, 40)
    assert lower.parent is upper and upper.children == {cut: lower}
    assert upper.tokens.tolist() == prompt[:cut] and lower.tokens.tolist() == prompt[cut:]
    edges = upper.root.children[ATTENTION], lower.root.children[ATTENTION]
    for kind, parts in (
        (Kind.KV, [edge.kv for edge in edges]),
        (Kind.HIDDEN, [edge.hidden for edge in edges]),
    ):
        first, second = parts
        assert first is not None and second is not None
        assert (first.start, first.end, second.start, second.end) == (0, cut, cut, 40)
        assert first.pages.tolist() == whole[kind][: (cut - 1) // PAGE + 1]
        assert second.pages.tolist() == whole[kind][cut // PAGE :]
        for column, page in enumerate(whole[kind]):
            both = column * PAGE < cut < (column + 1) * PAGE
            assert kept.pool.ref_counts[page] == 1 + both, f"column {column}"
    states = [edge.children[SSM].states for edge in edges]
    assert [sorted(at) for at in states] == [[cut], [40]], "a state stays at its token count"
    assert states[0][cut].node is upper and states[0][cut].end == cut
    assert upper.root.gate is not None and lower.root.gate is not None
    assert torch.equal(torch.cat([upper.root.gate, lower.root.gate]), gate)
    assert len(upper.root.gate) == cut
    assert kept.num_pages == before, "a cut takes no page"
    assert_whole(kept)
    kept.clear()
    assert kept.pool.free == kept.pool.num_pages and not kept.root.children


def test_a_node_cut_many_times_gives_every_page_back() -> None:
    kept, rng = small_cache(), random.Random(4)
    prompt = list(range(100))
    store(kept, tokens_of(prompt), BOTH, states=[7, 50, 100], hidden=[1])
    before = kept.num_pages
    for cut in rng.sample(range(1, 100), 40):
        kept.match(tokens_of(prompt[:cut], [999]))
        assert_whole(kept)
    assert kept.num_pages == before and len(nodes_of(kept)) == 41
    kept.clear()
    assert kept.pool.free == kept.pool.num_pages and not kept.root.children


def test_a_match_that_ends_with_a_node_cuts_nothing() -> None:
    kept = small_cache()
    node = store(kept, tokens_of(range(20)))
    splits = kept.splits
    assert kept.match(tokens_of(range(20)))[0] is node
    assert kept.match(tokens_of(range(25))) == (node, 20)
    assert kept.match(tokens_of([5, 6])) == (kept.root, 0)
    assert kept.match(tokens_of([])) == (kept.root, 0)
    assert kept.splits == splits
    upper, length = kept.match(tokens_of(range(8)))
    assert length == 8 and upper is not node and kept.splits == splits + 1


def test_routes_keep_their_entries_apart() -> None:
    kept = small_cache()
    store(kept, tokens_of(range(20)), (ATTENTION, SSM, SSM))
    pages = kept.num_pages
    node = store(kept, tokens_of(range(20)), (ATTENTION, ATTENTION, SSM))
    assert kept.num_pages == pages + 2 + kept.pool.layout.entry_pages, "layer 0 is there, layers 1 and 2 are not"
    first = node.root.children[ATTENTION]
    assert set(node.root.children) == {ATTENTION} and set(first.children) == {SSM, ATTENTION}
    assert first.children[ATTENTION].kv is not None and not first.children[ATTENTION].states
    assert first.children[SSM].kv is None and list(first.children[SSM].states) == [20]
    # behind different routes the state of layer 2 is another one
    behind = [first.children[route].children[SSM].states[20].pages for route in (SSM, ATTENTION)]
    assert not set(behind[0].tolist()) & set(behind[1].tolist())


def test_storing_the_same_again_takes_no_page() -> None:
    kept = small_cache()
    node = store(kept, tokens_of(range(20)))
    pages, entries = kept.num_pages, set(entries_of(kept))
    assert store(kept, tokens_of(range(20))) is node
    assert kept.num_pages == pages and set(entries_of(kept)) == entries


# --- pins and room ----------------------------------------------------------------------------------------------------


def test_a_pin_protects_a_node_and_those_above_it_alone() -> None:
    kept = small_cache()
    store(kept, tokens_of(range(20)))
    inner = store(kept, tokens_of(range(20), [50, 51]))
    store(kept, tokens_of(range(20), [60, 61]))
    kept.pin(inner)
    kept.clear()
    assert [(node.start, node.end) for node in nodes_of(kept)] == [(0, 20), (20, 22)]
    assert all(node.root.children for node in nodes_of(kept)), "with their entries"
    assert_whole(kept)
    kept.unpin(inner)
    assert [node.pins for node in nodes_of(kept)] == [0, 0]
    kept.clear()
    assert not kept.root.children and kept.num_pages == 0


def test_a_cut_keeps_both_parts_pinned_and_one_unpin_frees_both() -> None:
    kept = small_cache()
    node = store(kept, tokens_of(range(20)))
    kept.pin(node)
    upper, _ = kept.match(tokens_of(range(8), [99]))
    assert (upper.pins, node.pins) == (1, 1)
    kept.clear()
    assert len(entries_of(kept)) == 2 + 2 + 1, "KV of two layers in two parts, one state"
    kept.unpin(node)
    assert (upper.pins, node.pins) == (0, 0)
    with pytest.raises(AssertionError, match="unpinned more often"):
        kept.unpin(node)


def test_a_node_without_entries_goes_with_its_last_pin() -> None:
    kept = small_cache()
    node = kept.insert(tokens_of(range(9)))
    kept.pin(node)
    kept.check_integrity()
    kept.unpin(node)
    assert not kept.root.children


def test_an_empty_node_stays_while_it_joins_two_prefixes() -> None:
    kept = small_cache()
    prompt = list(range(20))
    store(kept, tokens_of(prompt, [50]), (SSM, SSM, SSM))
    store(kept, tokens_of(prompt, [60]), (SSM, SSM, SSM))
    joint = kept.root.children[0]
    assert sorted(joint.children) == [50, 60] and not joint.root.num_entries, "nothing at token 20"
    while any(node.root.num_entries for node in joint.children.values()):
        assert kept._evict_one()
        assert_whole(kept)
    assert not kept.root.children, "it joins nothing any more"


def test_pinned_entries_are_passed_over_once_and_have_their_turn_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = small_cache()
    held = [store(kept, tokens_of([first], range(20))) for first in range(3)]
    for node in held:
        kept.pin(node)
    for first in range(3, 9):
        store(kept, tokens_of([first], range(20)))
    asked: list[Entry] = []
    priority = kept.retention.priority
    monkeypatch.setattr(kept.retention, "priority", lambda entry: asked.append(entry) or priority(entry))
    pinned = [entry for node in held for here in node.root.subtree() for entry in here.entries()]
    while kept._evict_one():
        assert_whole(kept)
    assert sorted(kept.root.children) == [0, 1, 2], "all but the pinned ones went"
    assert all(asked.count(entry) <= 2 for entry in pinned), "however many were evicted meanwhile"
    kept.unpin(held[1])
    while kept._evict_one():
        assert_whole(kept)
    assert sorted(kept.root.children) == [0, 2]
    for node in (held[0], held[2]):
        kept.unpin(node)
    kept.clear()
    assert not kept.root.children and not kept._parked


def test_reclaim_frees_what_is_asked_for_and_not_more() -> None:
    kept = small_cache(memory_bytes=1 << 16)
    for i in range(5):
        store(kept, tokens_of([i], range(17)), (ATTENTION, ATTENTION, ATTENTION))
    assert kept.pool.available < 12 and kept.num_pages + kept.pool.free == kept.pool.num_pages == 32
    cached = kept.num_pages
    assert kept.reclaim(kept.pool.available) and kept.num_pages == cached
    assert kept.reclaim(12)
    assert kept.pool.available == 12, "an entry has two pages"
    assert_whole(kept)


def test_reclaim_changes_nothing_where_it_cannot_succeed() -> None:
    kept = small_cache(memory_bytes=1 << 16)
    store(kept, tokens_of(range(40)), (ATTENTION, ATTENTION, ATTENTION))
    live = kept.pool.allocate(10)
    cached = kept.num_pages
    assert not kept.reclaim(kept.pool.num_pages - 9)
    assert kept.num_pages == cached, "nothing was driven out in vain"
    assert kept.reclaim(kept.pool.num_pages - 10) and kept.num_pages == 0
    kept.pool.release(live)


def test_reclaim_takes_captures_last_and_ends_them() -> None:
    kept = small_cache(memory_bytes=1 << 16)
    store(kept, tokens_of(range(16)), (ATTENTION, ATTENTION, ATTENTION))
    captures = Captures()
    kept.register(captures)
    pages = kept.acquire(0, 3, 1.0)
    assert pages is not None
    captures.states[0] = {5: pages}
    assert kept.reclaim(kept.pool.num_pages - 3) and not captures.closed
    assert not entries_of(kept)
    assert kept.reclaim(kept.pool.num_pages) and captures.closed and not captures.states
    assert_whole(kept)


def test_acquire_does_not_drive_out_what_is_worth_more() -> None:
    kept = small_cache(memory_bytes=1 << 16)
    store(kept, tokens_of(range(160)), (ATTENTION, ATTENTION, ATTENTION))
    free = kept.pool.available
    assert free < 3
    cached = kept.num_pages
    assert kept.acquire(0, 3, saved_us=1e-5) is None
    assert kept.num_pages == cached
    pages = kept.acquire(0, 3, saved_us=1e9)
    assert pages is not None and len(set(pages.tolist())) == 3
    assert kept.num_pages < cached + 3, "it drove something out"
    assert kept.acquire(0, kept.capacity_pages + 1, saved_us=1e30) is None


def test_acquire_keeps_to_the_capacity() -> None:
    kept = small_cache(cache_bytes=8 * 2048)
    assert kept.capacity_pages == 8
    for i in range(5):
        store(kept, tokens_of([i], range(3)), (SSM, SSM, ATTENTION))
        assert kept.num_pages in (7, 8), "two states of three pages and a page of KV, and what else has room"


def test_conventional_evicts_whole_contexts_least_recently_used_first() -> None:
    kept = small_cache(context_cache="conventional")
    order = []
    for first in range(4):
        store(kept, tokens_of([first], range(20)))
        order.append(first)
    store(kept, tokens_of([1], range(20)))  # used again
    order = [0, 2, 3, 1]
    while order:
        assert kept._evict_one()
        order.pop(0)
        assert sorted(kept.root.children) == sorted(order), "the oldest context, all of it"
        for node in nodes_of(kept):
            kinds = [e.kind for here in node.root.subtree() for e in here.entries()]
            assert sorted(kind.value for kind in kinds) == ["kv", "kv", "state"]
        assert_whole(kept)


def profile_with(folder: Path, attention_us: float, ssm_us: float, ffn_us: float) -> Path:
    """A stored profile in which a prefilled token takes so long in each part of a layer."""
    key = profile_key(model().config, torch.float32, torch.device("cpu"))
    costs = {ATTENTION: attention_us, SSM: ssm_us, FFN: ffn_us}
    no_load = BranchLoad.of(prefills=[(1, 0)])
    # a constant for a batch, and R counts by batches of 256 tokens
    rest = {part: [0.0] * (len(terms(part, no_load, model().config)) - 1) for part in costs}
    BranchProfile(key, {PART_NAMES[p]: [256 * us, *rest[p]] for p, us in costs.items()}, {}).save(folder / "p.json")
    return folder / "p.json"


@pytest.mark.parametrize(("attention_us", "ssm_us"), [(50.0, 1.0), (1.0, 50.0), (3.0, 2.0)])
def test_what_reuse_saves_is_what_the_profile_says(tmp_path: Path, attention_us: float, ssm_us: float) -> None:
    """Eq. 5 by hand: the rows that enter layer 2 save both layers below, those that enter layer 1 the first.

    Routes that one request has taken, the text's and all texts' own, are weighed equally at first. Nobody has left them
    yet: as one request came by, the next is one in four to do so. Nor has a text come again: ten of eleven are expected
    to, and to be asked with twice in five gaps of 16 lookups.
    """
    kept = small_cache(profile=profile_with(tmp_path, attention_us, ssm_us, ffn_us=4.0))
    share = 1 / (1 + 2 ** (-1 / HALF_LIFE))  # of the second of two requests
    rate = 2 / (5 * 16) * 10 / 11
    for route, us, hits in ((ATTENTION, attention_us, rate), (SSM, ssm_us, rate * (1 + share) / 2)):
        node = store(kept, tokens_of([route] * 32), routes=(route, ATTENTION, SSM), hidden=[1, 2])
        first = node.root.children[route]
        for here, saved_us, depth in ((first, us + 4, 0.75), (first.children[ATTENTION], attention_us + 4, 0.5)):
            entry, num_bytes = here.hidden, 2 * kept.pool.layout.page_bytes
            assert entry is not None
            expected = 0.25 * hits * 32 * saved_us * depth / num_bytes
            assert kept._priority(entry) == pytest.approx(expected, rel=1e-4)
        whole = first.children[ATTENTION].children[SSM].states[32]
        assert first.children[ATTENTION].goal is not None
        pages = len(whole.pages)  # the rows below it are there: the state alone takes room, and saves its layer
        expected = hits * 32 * (ssm_us + 4) * 0.5 / (pages * kept.pool.layout.page_bytes)
        assert kept._priority(whole) == pytest.approx(expected, rel=1e-4)


def test_another_profile_changes_what_is_evicted(tmp_path: Path) -> None:
    """A context of KV and one of states, equally hot: the one cheaper to compute again, per byte, goes first."""
    first_gone = {}
    for attention_us, ssm_us in ((100.0, 1.0), (1.0, 100.0)):
        kept = small_cache(profile=profile_with(tmp_path, attention_us, ssm_us, ffn_us=1.0))
        for route in (ATTENTION, SSM):
            store(kept, tokens_of([route] * 64), routes=[route] * LAYERS)
        assert kept._evict_one()
        (first_gone[attention_us],) = kept.stats.evictions
        assert_whole(kept)
    assert first_gone == {100.0: "state", 1.0: "kv"}


def test_tokens_do_not_depend_on_the_profile(tmp_path: Path) -> None:
    asked = random_requests(model(), 20, seed=11)
    expected = serve(small_engine(model(), context_cache=None), asked)
    for costs in ((100.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 100.0, 0.0)):
        profile = profile_with(tmp_path, *costs)
        engine = small_engine(model(), profile=profile, cache_bytes=60 * 2048, reuse_generated=False)
        assert engine.profile is not None
        for ours, theirs in zip(serve(engine, asked), expected, strict=True):
            assert ours.same_bits(theirs)


def test_a_profile_of_another_model_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = profile_with(tmp_path, 5.0, 7.0, 1.0)
    other = make_model(num_hidden_layers=LAYERS, intermediate_size=64)
    with pytest.raises(ValueError, match="does not fit: its intermediate_size is 48, here 64"):
        small_engine(other, profile=path)
    path.rename(tmp_path / "flexops-profile-0.json")
    other.config.name_or_path = str(tmp_path)
    estimated, engine = small_engine(make_model(num_hidden_layers=LAYERS, intermediate_size=64)), small_engine(other)
    assert engine.profile is None and engine.cache is not None and estimated.cache is not None
    assert engine.cache.retention.layer_us(0, SSM) == estimated.cache.retention.layer_us(0, SSM)
    (record,) = caplog.records
    assert "costs are estimated, not measured" in record.getMessage()
    assert "its intermediate_size is 48, here 64" in record.getMessage()


def test_hotter_entries_survive() -> None:
    kept = small_cache()
    for first in range(4):
        store(kept, tokens_of([first], range(20)))
    for _ in range(5):
        store(kept, tokens_of([0], range(20)))
    while len(kept.root.children) > 1:
        assert kept._evict_one()
    assert list(kept.root.children) == [0]


# --- check_integrity --------------------------------------------------------------------------------------------------


def test_check_integrity_catches_planted_faults() -> None:
    def fresh() -> tuple[ContextCache, ContextNode, Entry]:
        kept = small_cache()
        store(kept, tokens_of(range(20)))
        node = store(kept, tokens_of(range(20), [50, 51]))
        kept.check_integrity()
        return kept, node, next(e for e in entries_of(kept) if e.node is node)

    kept, _, entry = fresh()
    kept._refs[entry.pages[0]] += 1
    with pytest.raises(AssertionError, match="does not hold"):
        kept.check_integrity()
    kept, _, entry = fresh()
    entry.pages = entry.pages[:-1]
    with pytest.raises(AssertionError, match="does not hold"):
        kept.check_integrity()
    kept, node, _ = fresh()
    node.start += 1
    with pytest.raises(AssertionError, match="context node out of place"):
        kept.check_integrity()
    kept, node, _ = fresh()
    assert node.parent is not None
    node.parent.parent = node
    with pytest.raises(AssertionError, match="context node out of place"):
        kept.check_integrity()
    kept, node, entry = fresh()
    assert node.parent is not None
    entry.node = node.parent
    with pytest.raises(AssertionError, match="entry out of place"):
        kept.check_integrity()
    kept, _, entry = fresh()
    entry.end += 1
    with pytest.raises(AssertionError, match="outside its node"):
        kept.check_integrity()
    kept, node, _ = fresh()
    node.children[7] = ContextNode(np.array([7], dtype=np.int32), node.end, node)
    with pytest.raises(AssertionError, match="empty context node"):
        kept.check_integrity()


def test_the_pool_notices_a_page_that_the_cache_forgot() -> None:
    kept = small_cache()
    store(kept, tokens_of(range(20)))
    owned = kept.owned()
    kept.pool.check_integrity(owned)
    with pytest.raises(AssertionError, match="page counts differ"):
        kept.pool.check_integrity(owned[:-1])
