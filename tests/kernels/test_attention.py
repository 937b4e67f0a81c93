"""Paged attention in Triton against the definition, and what must not change a row's bits."""

import pytest
import torch
import torch.nn.functional as F

from flexops.kernels import reference
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    bits,
    check,
    cu_seqlens,
    far_rows,
    ints,
    launch_grids,
    page_tables,
    pages,
    randn,
    rows_of_projection,
    triton_module,
)

attention = triton_module("attention")


def arguments(
    query_lens=(3, 1, 20),
    cached=(5, 40, 0),
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    page_tokens=16,
    dtype=torch.float32,
    spare_pages=2,
    seed=0,
):
    """Arguments of paged_attention over a scattered pool that is NaN wherever no key is."""
    context = [q + c for q, c in zip(query_lens, cached, strict=True)]
    counts = [-(-c // page_tokens) for c in context]
    table = page_tables(counts, sum(counts) + 1, seed, width=max([0, *counts]) + spare_pages)
    cache = pages(sum(counts) + 1, 2, kv_heads, page_tokens, head_dim, dtype=dtype)
    for r, tokens in enumerate(context):
        kv = randn(tokens, 2, kv_heads, head_dim, dtype=dtype, seed=seed + 10 + r)
        for i in range(counts[r]):
            part = kv[i * page_tokens : (i + 1) * page_tokens]
            cache[table[r, i], :, :, : len(part)] = part.permute(1, 2, 0, 3)
    q = rows_of_projection(sum(query_lens), q_heads, head_dim, dtype=dtype, seed=seed + 1)
    return q, cache, table, cu_seqlens(query_lens), ints(context), head_dim**-0.5, max([0, *query_lens])


def test_the_definition_agrees_with_torch():
    """Independent oracle: torch's own attention on each request's keys, gathered."""
    q, cache, table, cu, context, scale, longest = arguments((3, 1, 20), (5, 40, 0), dtype=torch.float64)
    result = reference.paged_attention(q, cache, table, cu, context, scale, longest)
    for r, tokens in enumerate(context.tolist()):
        queries = q[cu[r] : cu[r + 1]].transpose(0, 1)
        kv = cache[table[r, : -(-tokens // 16)].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
        seen = torch.ones(queries.shape[1], tokens, dtype=torch.bool, device=DEVICE).tril(tokens - queries.shape[1])
        expected = F.scaled_dot_product_attention(queries, *kv, attn_mask=seen, scale=scale, enable_gqa=True)
        torch.testing.assert_close(result[cu[r] : cu[r + 1]], expected.transpose(0, 1))


def run(**changes):
    return check(attention.paged_attention, reference.paged_attention, *arguments(**changes))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 112, 128, 256])
def test_head_dim(head_dim, dtype):
    run(head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"q_heads": 2},
        {"q_heads": 6},
        {"q_heads": 7, "kv_heads": 1},
        {"q_heads": 24, "kv_heads": 1},
        {"page_tokens": 1},
        {"page_tokens": 12},
        {"page_tokens": 64},
        {"query_lens": (1,), "cached": (0,)},
        {"query_lens": (2,), "cached": (0,)},
        {"query_lens": (33,), "cached": (31,)},
        {"query_lens": (70,), "cached": (0,)},
        {"query_lens": (2,), "cached": (130,)},
        {"query_lens": (0, 0, 1, 0, 1), "cached": (0, 3, 0, 7, 15)},
        {"query_lens": (0, 2, 0), "cached": (0, 2, 0)},
        {"query_lens": (1, 1, 1), "cached": (0, 14, 15)},
        {"query_lens": (1, 1), "cached": (255, 256)},
        {"query_lens": (1, 40), "cached": (600, 3)},
        {"query_lens": (), "cached": ()},
        {"query_lens": (0,), "cached": (0,)},
        {"spare_pages": 40},
    ],
    ids=str,
)
def test_varied(change, dtype):
    run(dtype=dtype, **change)


def test_scores_far_from_zero():
    """Logits of some hundreds: the maximum is subtracted before anything is raised to a power."""
    q, *rest = arguments(query_lens=(1, 20), cached=(300, 40))
    check(attention.paged_attention, reference.paged_attention, q * 50, *rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [(39, 0, 5), (600, 0, 300)], ids=["one split", "splits"])
def test_a_query_without_keys_gives_zeros(cached, dtype):
    """Padding: no keys and no pages, beside requests that have some."""
    args = list(arguments((1, 1, 1), cached, dtype=dtype))
    args[2][1], args[4][1] = -1, 0
    out, _ = check(attention.paged_attention, reference.paged_attention, *args)
    assert not out[1].any() and out[0].any() and out[2].any()


def test_longer_max_query_len_than_any_query():
    q, cache, table, cu, context, scale, longest = arguments()
    args = (q, cache, table, cu, context, scale)
    exact = attention.paged_attention(*args, longest)
    assert torch.equal(bits(attention.paged_attention(*args, 5 * longest)), bits(exact))


def test_splits_stay_within_their_limit(monkeypatch):
    """A context too long for MAX_SPLITS splits of SPLIT_TOKENS gets longer splits."""
    monkeypatch.setattr(attention, "MAX_SPLITS", 2)
    run(query_lens=(1, 1, 1), cached=(511, 512, 1100), q_heads=2, kv_heads=1)


def test_fewer_programs_than_splits(monkeypatch):
    args = arguments(query_lens=(1, 1), cached=(700, 300), q_heads=2, kv_heads=1)
    expected = attention.paged_attention(*args)
    monkeypatch.setattr(attention, "DECODE_PROGRAMS", 1)
    assert torch.equal(bits(attention.paged_attention(*args)), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_does_not_depend_on_its_batch(dtype):
    """Each request alone, with tight tables, gives the bits it has among prefills and decodes of other lengths."""
    q, cache, table, cu, context, scale, longest = arguments(
        (3, 1, 50, 1, 0), (5, 300, 9, 0, 4), kv_heads=1, dtype=dtype
    )
    whole = attention.paged_attention(q, cache, table, cu, context, scale, longest)
    for r in range(5):
        part = slice(int(cu[r]), int(cu[r + 1]))
        length = part.stop - part.start
        tight = table[r : r + 1, : -(-int(context[r]) // 16)]
        alone = attention.paged_attention(
            q[part], cache, tight, cu_seqlens([length]), context[r : r + 1], scale, length
        )
        assert torch.equal(bits(alone), bits(whole[part]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [2, 31, 64, 98])
def test_a_prompt_does_not_depend_on_its_cut(cut, dtype):
    """Whatever tile a row falls into, it meets the same blocks of keys in the same order."""
    q, cache, table, cu, context, scale, longest = arguments((100,), (7,), q_heads=2, kv_heads=1, dtype=dtype)
    whole = attention.paged_attention(q, cache, table, cu, context, scale, longest)
    first = attention.paged_attention(q[:cut], cache, table, cu_seqlens([cut]), context - 100 + cut, scale, cut)
    second = attention.paged_attention(q[cut:], cache, table, cu_seqlens([100 - cut]), context, scale, 100 - cut)
    assert torch.equal(bits(torch.cat([first, second])), bits(whole))


def test_offsets_past_32_bits():
    """Pages and rows beyond 2^31 elements give the bytes that near ones give."""
    cache, q = far_rows(3, 2, 2, 16, 16), far_rows(3, 4, 16)
    q[0] = q[2] = randn(4, 16, dtype=q.dtype)
    cache[0] = cache[2] = randn(2, 2, 16, 16, dtype=q.dtype, seed=1)
    decoded = attention.paged_attention(q, cache, ints([[0], [1], [2]]), cu_seqlens([1, 1, 1]), ints([9] * 3), 0.25, 1)
    assert torch.equal(decoded[0], decoded[2]) and decoded[2].any()
    near, far = (
        attention.paged_attention(q[1:], cache, ints([[page]]), cu_seqlens([2]), ints([9]), 0.25, 2) for page in (0, 2)
    )
    assert torch.equal(near, far) and far[1].any()


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, attention)
    q, table = torch.empty(65536, 1, 8, device=DEVICE), ints([[0]])
    cache = pages(1, 2, 1, 4, 8)
    attention.paged_attention(q, cache, table.expand(65536, 1), ints(range(65537)), ints([1] * 65536), 1.0, 1)
    attention.paged_attention(q, cache, table, ints([0, 65536]), ints([65536]), 1.0, 65536)
    assert [len(grid) for grid in grids] == [1, 1, 1] and grids[0] == (65536,)
