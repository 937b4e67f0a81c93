"""The page pool: layouts, contiguous runs, counts, integrity."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexops import FlexHybridConfig
from flexops.runtime.memory import FreeRuns, PageLayout, PagePool, PoolExhausted

BAMBA_LIKE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
}


def make_pool(num_pages: int = 64, dtype: torch.dtype = torch.float32, **changes: object) -> PagePool:
    config = FlexHybridConfig(**{**BAMBA_LIKE, **changes})
    layout = PageLayout.of(config, dtype)
    return PagePool(num_pages, layout, config, dtype, torch.device("cpu"))


def test_layout_of_the_design():
    layout = PageLayout.of(FlexHybridConfig(**BAMBA_LIKE), torch.float32)
    # a head's state is 64 * 128 * 4 = 32 KiB, 16 tokens of KV are 2 * 2 * 64 * 16 * 4 = 16 KiB
    assert layout.page_bytes == 32768
    assert (layout.page_tokens, layout.heads_per_page) == (32, 1)
    assert (layout.state_pages, layout.conv_pages, layout.entry_pages) == (16, 1, 17)
    assert layout.kv_waste == 0
    assert layout.state_waste == pytest.approx(1 - (16 * 32768 + 1280 * 4 * 4) / (17 * 32768))
    half = PageLayout.of(FlexHybridConfig(**BAMBA_LIKE), torch.bfloat16)
    assert (half.page_bytes, half.page_tokens) == (32768, 64)


def test_layout_of_sizes_that_are_no_powers_of_two():
    config = FlexHybridConfig(**{**BAMBA_LIKE, "head_dim": 80, "num_key_value_heads": 4, "mamba_n_heads": 12})
    layout = PageLayout.of(config, torch.float32)
    token = 2 * 4 * 80 * 4
    assert layout.page_bytes == 65536 and layout.page_tokens == 65536 // token
    assert layout.heads_per_page == 2 and layout.state_pages == 6
    assert layout.kv_waste == pytest.approx(1 - layout.page_tokens * token / 65536)


@pytest.mark.parametrize("route", ["attention", "ssm"])
def test_a_model_of_one_route_sizes_its_pages_by_that_route(route):
    layout = PageLayout.of(FlexHybridConfig(**BAMBA_LIKE, layer_routes=[route] * 12), torch.float32)
    assert layout.page_bytes == (16384 if route == "attention" else 32768)


def test_caches_are_views_of_the_same_pages():
    pool = make_pool()
    assert pool.kv_cache.shape == (64, 2, 2, 32, 64)
    assert pool.state_cache.shape == (64, 1, 64, 128)
    assert pool.conv_cache.shape == (64, 4, 1280)
    pool.kv_cache[3] = 1.5
    assert (pool.state_cache[3] == 1.5).all() and (pool.state_cache[2] == 0).all() and (pool.state_cache[4] == 0).all()
    pool.conv_cache[5] = 2.5
    assert (pool.kv_cache[5].flatten()[: 4 * 1280] == 2.5).all() and (pool.kv_cache[6] == 0).all()


def test_allocation_shares_and_returns():
    pool = make_pool()
    first, second = pool.allocate(17), pool.allocate(40)
    assert first == list(range(first[0], first[0] + 17)) and second == list(range(second[0], second[0] + 40))
    assert pool.available == 7
    with pytest.raises(PoolExhausted, match="8 pages wanted, 7 available of 64"):
        pool.allocate(8)
    assert pool.available == 7, "a refused allocation takes nothing"
    pool.share(first)
    pool.release(first)
    assert pool.available == 7, "shared pages stay until the last owner leaves"
    pool.check_integrity([*first, *second])
    pool.release(first, poison=True)
    assert pool.available == 24
    assert pool.kv_cache[first].isnan().all() and not pool.kv_cache[second].isnan().any()
    pool.release(second)
    pool.check_integrity([])
    assert pool.allocate(64) == list(range(64)), "everything free is one run again"


def test_reserved_pages_are_promised_once():
    pool = make_pool()
    pool.reserved += 60
    with pytest.raises(PoolExhausted):
        pool.allocate(5)
    pages = pool.allocate(60, reserved=True)
    assert len(set(pages)) == 60 and pool.reserved == 0 and pool.available == 4


def test_integrity_check_sees_a_lost_and_a_doubled_page():
    pool = make_pool()
    pages = pool.allocate(3)
    with pytest.raises(AssertionError, match="differ"):
        pool.check_integrity(pages[:2])
    with pytest.raises(AssertionError, match="differ"):
        pool.check_integrity([*pages, pages[0]])
    with pytest.raises(AssertionError, match="free page"):
        pool.release([pages[0], 63])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
def test_free_runs_hold_every_page_once(actions):
    runs, held = FreeRuns(50), []
    for take, n in actions:
        if take and n <= runs.count:
            longest = max((length for length in runs._length.values()), default=0)
            pages = runs.take(n)
            assert len(set(pages)) == n and not set(pages) & {p for allocation in held for p in allocation}
            if longest >= n:
                assert pages == list(range(pages[0], pages[0] + n)), "contiguous where a run is free"
            held.append(pages)
        elif held:
            for page in held.pop(n % len(held)):
                runs.give(page, 1)
        free = runs.pages()
        assert len(free) == runs.count
        assert sorted([*free, *(p for allocation in held for p in allocation)]) == list(range(50))
        starts = sorted(runs._length)
        assert all(a + runs._length[a] < b for a, b in pairwise(starts)), "neighbours are joined"
