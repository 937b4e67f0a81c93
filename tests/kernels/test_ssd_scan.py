"""The chunked scan in Triton against the sequential definition: sizes, chunk grid, states, precision."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import DTYPES, bits, check, cu_seqlens, far_rows, ints, randn, triton_module
from tests.kernels.ssm_inputs import reverse_programs, scan_arguments

ssd = triton_module("ssd_scan")
DT, A_LOG, CACHE, INITIAL, FINAL, CHECKPOINTS = 1, 2, 10, 11, 12, 14  # places among the arguments
CHUNK = 16


def run_arguments(args):
    return check(ssd.ssd_scan, reference.ssd_scan, *args, mutated=(CACHE,) if len(args) > CACHE else ())


def run(*args, **kwargs):
    return run_arguments(scan_arguments(*args, **kwargs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"groups": 1},
        {"heads": 8, "groups": 8},
        {"head_dim": 8},
        {"head_dim": 80},
        {"head_dim": 96},
        {"head_dim": 136, "heads": 2},
        {"d_state": 64},
        {"d_state": 80},
        {"d_state": 128, "heads": 2},
        {"d_state": 256, "heads": 2},
        {"chunk": 32},
        {"chunk": 128},
        {"per_page": 1},
        {"per_page": 4},
        {"per_page": 8},
        {"D": False},
        {"dt_bias": False},
        {"initial": False},
        {"final": False},
        {"initial": [False, True, True], "final": [True, False, True]},
        {"checkpoints": [4, 5, 12, 28, 44, 45]},
        {"extra_rows": 3},
    ],
    ids=str,
)
def test_ssd_scan(change, dtype):
    run([5, 1, 40], [0, 20, 25], dtype=dtype, **change)


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1])
@pytest.mark.parametrize("start", [0, 3, CHUNK - 1, 5 * CHUNK])
def test_lengths_on_the_grid(start, length):
    run([length], [start], heads=2)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_within_a_chunk(dtype, chunk):
    run([150, 1], [70, 127], chunk=chunk, heads=1, groups=1, dtype=dtype, checkpoints=[57])


def test_decay_counts_from_the_sequence_not_from_the_chunk():
    for batch in ([5, 1, 31], [31], [5], [1]):
        for start in (0, 9):
            run(batch, [start] * len(batch), chunk=16)


def test_empty_sequences_pass_their_state_on():
    _, args = run([0, 0, 1, 0, 2, 0], [0, 5, 16, 15, 15, 31], initial=[True, False] * 3)
    cache, read, written = args[CACHE], args[INITIAL].long(), args[FINAL].long()
    assert torch.equal(cache[written[0, 0]], cache[read[0, 0]])
    assert (cache[written[5, 0]] == 0).all()


@pytest.mark.parametrize("extra_rows", [0, 5])
def test_no_rows(extra_rows):
    run([0, 0], extra_rows=extra_rows)
    run([], extra_rows=extra_rows)


def test_many_short_sequences_across_chunk_ends():
    run([2] * 9, [CHUNK - 1] * 9, heads=1, groups=1)


@pytest.mark.parametrize("initial", [False, True])
def test_without_a_cache(initial):
    run_arguments(scan_arguments([5, 20])[:CACHE])
    args = scan_arguments([5, 20])
    args[INITIAL if initial else FINAL] = None
    run_arguments(args)


def test_final_state_in_place_of_the_initial_one(monkeypatch):
    forwards, args = run([20, 5], [3, 0], in_place=True)
    reverse_programs(monkeypatch)
    backwards, again = run([20, 5], [3, 0], in_place=True)
    assert torch.equal(forwards, backwards)
    assert torch.equal(bits(args[CACHE]), bits(again[CACHE]))


def test_checkpoint_inside_a_chunk_is_not_written():
    args = scan_arguments([40], [0], checkpoints=[15, 20, 39])
    before = args[CACHE].clone()
    ssd.ssd_scan(*args)
    pages = args[CHECKPOINTS].long()
    assert torch.equal(bits(args[CACHE][pages[1]]), bits(before[pages[1]]))
    assert not args[CACHE][pages[0, 0]].isnan().any()
    assert torch.equal(args[CACHE][pages[2, 0]], args[CACHE][args[FINAL][0, 0]])


def test_checkpoint_at_the_end_of_the_sequence_before():
    run([5, 20], [0, 2 * CHUNK], checkpoints=[4, 5 + CHUNK - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 11])
def test_cut_at_a_chunk_end_and_resumed_gives_the_same_bits(start, dtype):
    length, chunk = 150, 32
    ends = [row for row in range(length) if (start + row + 1) % chunk == 0]
    sizes = {"chunk": chunk, "heads": 2, "groups": 1, "dtype": dtype}
    args = scan_arguments([length], [start], checkpoints=ends, **sizes)
    whole = ssd.ssd_scan(*args)
    cache, saved, final = args[CACHE], args[CHECKPOINTS], args[FINAL]
    state = cache[final[0].long()].clone()
    for i, end in enumerate(ends):
        cut = end + 1
        rest = [x[cut:] if x.shape[0] == length else x for x in args[:7]]
        spent = cache[saved[i].long()].clone()
        y = ssd.ssd_scan(*rest, cu_seqlens([length - cut]), ints([start + cut]), chunk, cache, saved[i : i + 1], final)
        assert torch.equal(y, whole[cut:])
        assert torch.equal(bits(cache[final[0].long()]), bits(state))
        assert torch.equal(bits(cache[saved[i].long()]), bits(spent))
    y = ssd.ssd_scan(*[x[:cut] if x.shape[0] == length else x for x in args[:7]], cu_seqlens([cut]), *args[8:13])
    assert torch.equal(y, whole[:cut])
    assert torch.equal(bits(cache[final[0].long()]), bits(cache[saved[-1].long()]))


def test_a_sequence_does_not_see_its_neighbours():
    both, args = run([37, 9], [5, 4])
    cache, written = args[CACHE], args[FINAL][:1]
    final = cache[written[0].long()].clone()
    own = [x[:37] if x.shape[0] == 46 else x for x in args[:7]]
    alone = ssd.ssd_scan(*own, cu_seqlens([37]), args[8][:1], CHUNK, cache, args[INITIAL][:1], written)
    assert torch.equal(alone, both[:37])
    assert torch.equal(bits(cache[written[0].long()]), bits(final))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_extreme_decay(dtype):
    args = scan_arguments([4096], [0], chunk=256, heads=1, per_page=1, head_dim=8, groups=1, dt_bias=False, dtype=dtype)
    args[A_LOG] = torch.tensor([16.0], device=args[DT].device).log()
    args[DT].fill_(50.0)
    y, after = run_arguments(args)
    assert y.isfinite().all()
    assert after[CACHE][after[FINAL][0, 0].long(), 0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_steps_after_large_ones(dtype):
    """A sum of dt A in the thousands must not cost the precision of the decays that follow it."""
    args = scan_arguments([300], [0], chunk=128, heads=2, groups=1, dt_bias=False, dtype=dtype)
    large = torch.rand(300, 1, generator=torch.Generator().manual_seed(0)).to(args[DT].device) < 0.05
    args[DT].copy_(torch.where(large, torch.full_like(args[DT], 40.0), args[DT] * 0.5 - 5))
    run_arguments(args)


def test_softplus_in_both_tails():
    for dt in (-80.0, -20.0, -3.0, 0.0, 3.0, 20.0, 80.0):
        args = scan_arguments([3], [0], heads=2, dt_bias=False, initial=False)
        args[DT].fill_(dt)
        run_arguments(args)


def test_offsets_beyond_32_bits():
    cache, x, B = far_rows(3, 1, 8, 16, dtype=torch.float32), far_rows(3, 2, 8), far_rows(3, 1, 16)
    x.copy_(randn(3, 2, 8, dtype=x.dtype))
    B.copy_(randn(3, 1, 16, dtype=x.dtype, seed=1))
    dt, a_log = randn(3, 2, dtype=x.dtype, seed=2), torch.zeros(2, device=x.device)
    results = []
    for rows, Bs, read, written in ((x.contiguous(), B.contiguous(), 0, 1), (x, B, 2, 0), (x, B, 0, 2)):
        cache[read] = randn(1, 8, 16, seed=3)
        tables = ints([[read, read]]), ints([[written, 1 if written != 1 else 2]])
        y = ssd.ssd_scan(rows, dt, a_log, Bs, Bs, None, None, cu_seqlens([3]), ints([6]), 16, cache, *tables)
        results.append((y, cache[written].clone()))
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


def test_grid_of_a_long_batch(monkeypatch):
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(ssd, "ssd_states_kernel", Recorder())
    monkeypatch.setattr(ssd, "ssd_outputs_kernel", Recorder())
    tokens, heads = 2**20, 128
    x, B = torch.empty(tokens, heads, 64, device="meta"), torch.empty(tokens, 8, 128, device="meta")
    dt, a_log = torch.empty(tokens, heads, device="meta"), torch.empty(heads, device="meta")
    index = torch.empty(2, dtype=torch.int32, device="meta")
    ssd.ssd_scan(x, dt, a_log, B, B, None, None, index, index[:1], 256)
    assert len(launched) == 2
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in launched)
