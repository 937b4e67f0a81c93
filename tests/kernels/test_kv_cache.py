"""Rotation and the append to the paged KV cache in Triton against the definition."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    bits,
    check,
    far_rows,
    ints,
    launch_grids,
    pages,
    randn,
    rows_of_projection,
    triton_module,
)

kv_cache = triton_module("kv_cache")
SLOTS = [5, -1, 16, 0, 47, -1, 33]  # pages 0, 1, 2 of 16 tokens
CACHE = 5  # the position of kv_cache among the arguments


def rope_table(rotary_dim: int, dtype=torch.float32):
    angle = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(DEVICE, dtype)


def append(
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    rotary_dim: int | None = -1,
    page_tokens=16,
    dtype=torch.float32,
    cache_dtype=None,
    table_dtype=torch.float32,
    slots=SLOTS,
    slack=16,
):
    tokens = len(slots)
    rotary_dim = head_dim if rotary_dim == -1 else rotary_dim
    args = (
        rows_of_projection(tokens, q_heads, head_dim, dtype=dtype, seed=1),
        rows_of_projection(tokens, kv_heads, head_dim, dtype=dtype, seed=2, before=16),
        rows_of_projection(tokens, kv_heads, head_dim, dtype=dtype, seed=3, before=24),
        None if rotary_dim is None else rope_table(rotary_dim, table_dtype),
        ints([(7 * i + 3) % 64 for i in range(tokens)]),
        pages(4, 2, kv_heads, page_tokens, head_dim, dtype=cache_dtype or dtype, slack=slack),
        ints(slots, torch.int64),
    )
    return check(kv_cache.append_kv, reference.append_kv, *args, mutated=(CACHE,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 112, 128, 256])
def test_append_kv(head_dim, dtype):
    append(head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"rotary_dim": None},
        {"rotary_dim": 16},
        {"rotary_dim": 24},
        {"q_heads": 2},
        {"q_heads": 6},
        {"q_heads": 7, "kv_heads": 1},
        {"kv_heads": 4},
        {"page_tokens": 12},
        {"page_tokens": 1, "slots": [2, -1, 0]},
        {"cache_dtype": torch.bfloat16},
        {"table_dtype": torch.bfloat16},
        {"slots": []},
        {"slots": [-1, -1]},
        {"slots": [63]},
        {"slack": 0},
        {"slack": 3},
    ],
    ids=str,
)
def test_append_kv_varied(change, dtype):
    append(dtype=dtype, **change)


def test_append_kv_without_rotation_copies():
    q, cache = randn(1, 2, 8), pages(1, 2, 1, 4, 8)
    out = kv_cache.append_kv(q, q[:, :1], q[:, 1:], None, ints([0]), cache, ints([3], torch.int64))
    assert torch.equal(out, q) and out.data_ptr() != q.data_ptr()
    assert torch.equal(cache[0, 0, :, 3], q[0, :1]) and torch.equal(cache[0, 1, :, 3], q[0, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [32, 80])
def test_apply_rope(rotary_dim, dtype):
    x = rows_of_projection(5, 3, 80, dtype=dtype)
    check(kv_cache.apply_rope, reference.apply_rope, x, rope_table(rotary_dim), ints([0, 63, 7, 7, 1]))


def test_the_definition_of_rotation_agrees_with_transformers():
    """Independent oracle: the half-split rotation of the Llama models."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, table, positions = randn(5, 3, 64).double(), rope_table(64).double(), ints([0, 63, 7, 7, 1])
    cos, sin = table[positions.long()].chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    heads_first = x.transpose(0, 1)[None]
    expected, _ = llama.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    torch.testing.assert_close(reference.apply_rope(x, table, positions), expected[0].transpose(0, 1))


def test_offsets_past_32_bits():
    cache, x = far_rows(3, 2, 2, 4, 16), far_rows(3, 4, 16)
    x[0] = x[2] = randn(4, 16, dtype=x.dtype)
    kv, table = x[:, :2], rope_table(16)
    q = kv_cache.append_kv(x, kv, kv, table, ints([5, 5, 5]), cache, ints([1, -1, 2 * 4 + 1], torch.int64))
    assert torch.equal(q[0], q[2]) and torch.equal(cache[0], cache[2]) and cache[2].any()


def test_a_token_does_not_depend_on_the_others():
    q, kv = randn(5, 4, 64, dtype=torch.bfloat16), randn(5, 2, 64, dtype=torch.bfloat16, seed=1)
    table, positions, slots = rope_table(64), ints([3, 9, 1, 4, 4]), ints([4, 1, 0, 2, 7], torch.int64)
    whole = pages(1, 2, 2, 16, 64, dtype=torch.bfloat16)
    single = whole.clone()
    rotated = kv_cache.append_kv(q, kv, kv, table, positions, whole, slots)
    for i in range(5):
        one = slice(i, i + 1)
        alone = kv_cache.append_kv(q[one], kv[one], kv[one], table, positions[one], single, slots[one])
        assert torch.equal(bits(alone), bits(rotated[one]))
    assert torch.equal(bits(single), bits(whole))


def test_grids_of_many_rows(monkeypatch):
    """Only the first axis of a grid may hold more than 65535 programs."""
    grids = launch_grids(monkeypatch, kv_cache)
    x = torch.empty(65536, 1, 8, device=DEVICE)
    kv_cache.append_kv(x, x, x, None, ints([0]), pages(1, 2, 1, 4, 8), ints([0], torch.int64))
    assert grids == [(65536,)]
