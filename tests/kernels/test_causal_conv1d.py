"""The varlen convolution in Triton against the definition: windows, pages, checkpoints."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import DTYPES, bits, check, cu_seqlens, far_rows, ints, randn, triton_module
from tests.kernels.ssm_inputs import conv_arguments, reverse_programs

conv = triton_module("causal_conv1d")
CACHE, INITIAL, FINAL = 5, 6, 7  # places among the arguments


def run(*args, **kwargs):
    return check(conv.causal_conv1d, reference.causal_conv1d, *conv_arguments(*args, **kwargs), mutated=(CACHE,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"width": 2},
        {"width": 3},
        {"bias": False},
        {"initial": False},
        {"final": False},
        {"initial": [True, False, True], "final": [False, True, True]},
        {"in_place": True},
        {"checkpoints": [0, 1, 5, 8, 10, 17]},
        {"checkpoints": [9], "in_place": True},
        {"extra_rows": 3},
        {"per_page": 24},
        {"per_page": 64},
        {"per_page": 5},
        {"channels": 300, "per_page": 272},
    ],
    ids=str,
)
def test_causal_conv1d(change, dtype):
    run([9, 1, 8], dtype=dtype, **change)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 63, 64, 65, 66, 67, 129])
def test_lengths(length, width):
    run([length], width=width, checkpoints=range(0, length, 16))


def test_empty_sequences_pass_their_window_on():
    _, args = run([0, 0, 1, 0, 2, 0], initial=[True, False] * 3)
    cache, read, written = args[CACHE], args[INITIAL].long(), args[FINAL].long()
    assert torch.equal(cache[written[0]][..., :8], cache[read[0]][..., :8])
    assert (cache[written[5, 0]] == 0).all()


@pytest.mark.parametrize("extra_rows", [0, 5])
def test_no_rows(extra_rows):
    run([0, 0], extra_rows=extra_rows)
    run([], initial=True, extra_rows=extra_rows)


@pytest.mark.parametrize("initial", [False, True])
def test_without_a_cache(initial):
    args = conv_arguments([5, 70], channels=300)[:5]
    check(conv.causal_conv1d, reference.causal_conv1d, *args)
    args = conv_arguments([5, 70], checkpoints=[3])
    args[INITIAL if initial else FINAL] = None
    check(conv.causal_conv1d, reference.causal_conv1d, *args, mutated=(CACHE,))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 70])
def test_final_window_in_place_of_the_initial_one(length, backwards, monkeypatch):
    if backwards:
        reverse_programs(monkeypatch)
    rows = [r for r in (0, 1, 2, 3, 69) if r < length]
    run([length, length], in_place=True, checkpoints=rows)


@pytest.mark.parametrize("suffix", [1, 2, 3])
def test_short_suffix_leaves_the_shared_window_alone(suffix):
    args = conv_arguments([suffix, 5])
    args[INITIAL][1] = args[INITIAL][0]
    shared = args[CACHE][args[INITIAL][0].long()].clone()
    _, after = check(conv.causal_conv1d, reference.causal_conv1d, *args, mutated=(CACHE,))
    assert torch.equal(bits(after[CACHE][after[INITIAL][0].long()]), bits(shared))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 64, 65, 70])
def test_cut_and_resumed_gives_the_same_bits(cut, dtype):
    length = 70
    args = conv_arguments([length], [5], dtype=dtype, per_page=24)
    x, weight, bias, _, _, cache, read, written = args[:8]
    whole = conv.causal_conv1d(x, weight, bias, cu_seqlens([length]), ints([5]), cache, read, written)
    final = cache[written[0, 0]].clone()
    first = conv.causal_conv1d(x[:cut], weight, bias, cu_seqlens([cut]), ints([5]), cache, read, written)
    then = (cu_seqlens([length - cut]), ints([5 + cut]), cache, written, written)
    second = conv.causal_conv1d(x[cut:], weight, bias, *then)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(cache[written[0, 0]], final)


def test_a_sequence_does_not_see_its_neighbours():
    both, args = run([20, 9], [1, 4])
    x, weight, bias, _, starts, cache, read, written = args[:8]
    final = cache[written[0].long()].clone()
    batch = (cu_seqlens([20]), starts[:1], cache, read[:1], written[:1])
    assert torch.equal(conv.causal_conv1d(x[:20], weight, bias, *batch), both[:20])
    assert torch.equal(bits(cache[written[0].long()]), bits(final))


def test_offsets_beyond_32_bits():
    cache, x = far_rows(3, 4, 16), far_rows(3, 16)
    x.copy_(randn(3, 16, dtype=x.dtype))
    weight = randn(16, 4, dtype=x.dtype, seed=1)
    results = []
    for rows, (read, written) in ((x.contiguous(), (0, 1)), (x, (2, 1)), (x, (1, 2))):
        cache[read] = randn(4, 16, dtype=x.dtype, seed=2)
        tables = ints([[read]]), ints([[written]])
        y = conv.causal_conv1d(rows, weight, None, cu_seqlens([3]), ints([6]), cache, *tables)
        results.append((y, cache[written].clone()))
    for y, window in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(window, results[0][1])


def test_grid_of_a_long_batch(monkeypatch):
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(conv, "causal_conv1d_kernel", Recorder())
    x = torch.empty(1, 16).expand(2**23, 16)
    conv.causal_conv1d(x, torch.empty(16, 4), None, torch.empty(2, dtype=torch.int32), torch.empty(1))
    (grid,) = launched
    assert max(grid[1:]) < 65536
    assert grid[0] < 2**31
