"""The fused decode launch in Triton: the bits of the two kernels that it joins, whatever shares the grid."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flexops.kernels import reference
from tests.kernels.helpers import DTYPES, bits, check, copy_with_storage, ints, launch_grids, triton_module
from tests.kernels.ssm_inputs import reverse_programs, update_arguments
from tests.kernels.test_attention import arguments as attention_arguments

fused = triton_module("decode_branches")
attention = triton_module("attention")
step = triton_module("state_update")
MUTATED = (14, 17)  # conv_cache and state_cache among the arguments


def arguments(
    contexts: Sequence[int] = (5, 40, 1), positions: Sequence[int] = (0, 3, 6), dtype=torch.float32, **changes
) -> list:
    """Arguments of decode_branches; `changes` named q_heads, kv_heads, head_dim or page_tokens go to attention, the
    rest, with "ssm_" before a name that both have, to the SSM branch."""
    of_attention = {k: changes.pop(k) for k in ("q_heads", "kv_heads", "head_dim", "page_tokens") if k in changes}
    of_ssm = {k.removeprefix("ssm_"): v for k, v in changes.items()}
    q, cache, table, _, lens, scale, _ = attention_arguments(
        [1] * len(contexts), [c - 1 for c in contexts], dtype=dtype, **of_attention
    )
    return [q, cache, table, lens, scale, *update_arguments(positions, dtype=dtype, **of_ssm)]


def apart(args: list) -> tuple[Tensor, ...]:
    """The two kernels, one after the other."""
    q, cache, table, lens, scale, *ssm = args
    rows = attention.paged_attention(q, cache, table, ints(range(len(q) + 1)), lens, scale, 1)
    return rows, *step.state_update(*ssm)


def assert_same_bits(args: list, run=fused.decode_branches) -> None:
    """Results and both caches, through their whole storage, are those of the two kernels."""
    ours, theirs = ([copy_with_storage(x) if isinstance(x, Tensor) else x for x in args] for _ in range(2))
    for got, expected in zip(run(*ours), apart(theirs), strict=True):
        assert got.shape == expected.shape
        assert torch.equal(bits(got), bits(expected))
    for i in MUTATED:
        assert torch.equal(bits(ours[i]), bits(theirs[i]))
        assert not torch.equal(bits(ours[i]), bits(args[i])) or len(args[5]) == 0


VARIED = {
    "more attention": {"contexts": (3, 9, 17, 33, 64, 2, 1)},
    "more SSM": {"contexts": (3,), "positions": range(9)},
    "one each": {"contexts": (1,), "positions": (0,)},
    "splits": {"contexts": (256, 257, 700), "q_heads": 2, "kv_heads": 1},
    "heads": {"q_heads": 7, "kv_heads": 1, "heads": 6, "groups": 3},
    "head dims": {"head_dim": 80, "ssm_head_dim": 40},
    "state": {"d_state": 80, "heads": 2},
    "pages": {"page_tokens": 12, "channels_per_page": 7, "heads_per_page": 1},
    "no weights": {"conv_bias": False, "D": False, "dt_bias": False},
    "odd counts": {"contexts": (2, 31, 8, 1, 65), "positions": range(7), "heads": 3, "groups": 1},
    "one of attention beside many": {"contexts": (300,), "positions": range(11)},
    "one of the SSM beside many": {"contexts": range(1, 12), "positions": (4,)},
    "padding": {"live": [True, False, True], "initial": [False, True, True]},
    "in place": {"in_place": True},
    "width": {"width": 2},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", VARIED.values(), ids=VARIED.keys())
def test_bits_of_the_two_kernels(change, dtype):
    assert_same_bits(arguments(dtype=dtype, **change))


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_definition(dtype):
    args = arguments(contexts=(5, 300, 16, 1), dtype=dtype)
    check(fused.decode_branches, reference.decode_branches, *args, mutated=MUTATED)


def test_any_order_of_programs(monkeypatch):
    args = arguments(contexts=(5, 300, 16), in_place=True)
    reverse_programs(monkeypatch)
    assert_same_bits(args)


@pytest.mark.parametrize("contexts", [(5, 40, 1), (5, 300, 1)], ids=["one split", "splits"])
@pytest.mark.parametrize("padded", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_padding_of_attention(contexts, padded):
    """Requests without a token and without pages change nothing of the others; their own rows are zero."""
    args = arguments(contexts=contexts)
    expected = fused.decode_branches(*[copy_with_storage(x) if isinstance(x, Tensor) else x for x in args])
    args[2][padded], args[3][padded] = -1, 0
    theirs = apart([copy_with_storage(x) if isinstance(x, Tensor) else x for x in args])
    got = fused.decode_branches(*args)
    live = [i for i in range(3) if i not in padded]
    assert not got[0][padded].any()
    for other in (expected, theirs):
        assert torch.equal(bits(got[0][live]), bits(other[0][live]))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got[1:], other[1:], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_alone_writes_nothing(dtype):
    """Both sides full of padding, as in a launch whose batch has been filled up."""
    args = arguments(contexts=(9, 4), positions=(3, 2), live=[False, False], dtype=dtype)
    args[2][:], args[3][:] = -1, 0
    before = [bits(args[i]).clone() for i in MUTATED]
    theirs = apart([copy_with_storage(x) if isinstance(x, Tensor) else x for x in args])
    for got, expected in zip(fused.decode_branches(*args), theirs, strict=True):
        assert torch.equal(bits(got), bits(expected)) and not got.any()
    assert all(torch.equal(bits(args[i]), old) for i, old in zip(MUTATED, before, strict=True))


@pytest.mark.parametrize(
    ("contexts", "positions"), [((), (1, 2)), ((4, 5), ()), ((), ()), ((), (0,)), ((1,), ()), ((4, 300, 5), ())]
)
def test_a_branch_without_requests(contexts, positions):
    args = arguments(contexts=contexts, positions=positions)
    out, y, sums = fused.decode_branches(*args)
    assert (len(out), len(y), len(sums)) == (len(contexts), len(positions), len(positions))
    assert_same_bits(arguments(contexts=contexts, positions=positions))


def test_one_grid_for_both_branches(monkeypatch):
    """4 requests and 2 KV heads of one split, 3 requests and 4 SSM heads: 8 + 12 programs and nothing else."""
    grids = [launch_grids(monkeypatch, module) for module in (fused, attention, step)]
    fused.decode_branches(*arguments(contexts=(3, 9, 17, 33)))
    assert grids == [[(20,)], [], []]
    fused.decode_branches(*arguments(contexts=(600,)))
    assert grids == [[(20,), (2 * 3 + 12,)], [(4,)], []], "three splits of a request, and their sums per head"


def test_a_tile_that_takes_more_warps_is_launched_on_its_own(monkeypatch):
    """Another number of warps would change the order of sums in the other branch."""
    grids = [launch_grids(monkeypatch, module) for module in (fused, attention, step)]
    fused.decode_branches(*arguments(q_heads=32, kv_heads=1, head_dim=256))
    assert grids == [[], [(3,)], [(12,)]]
