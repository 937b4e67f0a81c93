"""The fused decode step in Triton against the definition: rings, pages, padding, and against the prefill kernels."""

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import DTYPES, assert_bound, bits, check, cu_seqlens, far_rows, ints, randn, triton_module
from tests.kernels.ssm_inputs import reverse_programs, update_arguments

step = triton_module("state_update")
conv = triton_module("causal_conv1d")
ssd = triton_module("ssd_scan")
CONV, CONV_IN, CONV_OUT, STATE, STATE_IN, STATE_OUT = 9, 10, 11, 12, 13, 14  # places among the arguments
POSITIONS = [0, 1, 2, 7]


def run(*args, **kwargs):
    arguments = update_arguments(*args, **kwargs)
    return check(step.state_update, reference.state_update, *arguments, mutated=(CONV, STATE))


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
        {"d_state": 256, "heads": 2, "head_dim": 64},
        {"width": 2},
        {"width": 3},
        {"channels_per_page": 7},
        {"channels_per_page": 128},
        {"channels_per_page": 200},
        {"heads_per_page": 1},
        {"heads_per_page": 4},
        {"heads_per_page": 8},
        {"conv_bias": False},
        {"D": False},
        {"dt_bias": False},
        {"initial": False},
        {"initial": [True, False, True, False]},
        {"live": [False, True, True, False]},
        {"in_place": True},
    ],
    ids=str,
)
def test_state_update(change, dtype):
    run(POSITIONS, dtype=dtype, **change)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_slot_of_the_ring(width, in_place):
    run([width * 5 + slot for slot in range(width)], heads=2, width=width, in_place=in_place)


def test_padding_touches_nothing():
    args = update_arguments(POSITIONS[:3], live=[True, False, True])
    args[STATE_OUT][0] = args[STATE].shape[0] - 1 - torch.arange(2, dtype=torch.int32)
    (out, sums), _ = check(step.state_update, reference.state_update, *args, mutated=(CONV, STATE))
    assert (out[1] == 0).all()
    assert (sums[1] == 0).all()
    run(POSITIONS, live=False)


def test_no_requests():
    run([])


def test_window_without_a_page_is_not_written():
    args = update_arguments(POSITIONS)
    args[CONV_OUT][1] = -1
    check(step.state_update, reference.state_update, *args, mutated=(CONV, STATE))


def test_one_of_two_pages_stays():
    """Pages that move and pages that stay in one request give the same bits as pages that all move."""
    sizes = {"channels_per_page": 64, "heads_per_page": 2}
    results, moved = run(POSITIONS, **sizes)
    args = update_arguments(POSITIONS, **sizes)
    args[CONV_OUT][:, 0] = args[CONV_IN][:, 0]
    args[STATE_OUT][:, 1] = args[STATE_IN][:, 1]
    for a, b in zip(step.state_update(*args), results, strict=True):
        assert torch.equal(a, b)
    for cache, written in ((CONV, CONV_OUT), (STATE, STATE_OUT)):
        there, here = moved[cache][moved[written].long()], args[cache][args[written].long()]
        assert torch.equal(bits(there), bits(here))


def test_in_place_equals_moved_in_any_order_of_programs(monkeypatch):
    sizes = {"dtype": torch.bfloat16, "channels_per_page": 64, "heads_per_page": 2}
    args = update_arguments(POSITIONS, **sizes)
    (out, sums), (moved, moved_state) = step.state_update(*args), (args[CONV], args[STATE])
    for backwards in (False, True):
        if backwards:
            reverse_programs(monkeypatch)
        again = update_arguments(POSITIONS, **sizes, in_place=True)
        out_again, sums_again = step.state_update(*again)
        assert torch.equal(out, out_again)
        assert torch.equal(sums, sums_again)
        for cache, there, here in ((moved, args[CONV_OUT], CONV), (moved_state, args[STATE_OUT], STATE)):
            assert torch.equal(bits(cache[there.long()]), bits(again[here][again[here + 2].long()]))


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_heads_of_a_program_do_not_change_the_bits(heads, monkeypatch):
    sizes = {"heads": 12, "groups": 2, "dtype": torch.bfloat16}
    alone, alone_args = run([5], **sizes)
    monkeypatch.setattr(step, "heads_per_program", lambda *_: heads)
    shared, shared_args = run([5], **sizes)
    for a, b in zip([*alone, *alone_args[9:]], [*shared, *shared_args[9:]], strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(
    "num_heads, n_groups, batch, heads", [(48, 1, 1, 1), (48, 1, 64, 4), (24, 8, 256, 3), (7, 7, 999, 1)]
)
def test_heads_per_program(num_heads, n_groups, batch, heads):
    assert step.heads_per_program(batch, num_heads, n_groups) == heads


def test_finished_norm_equals_the_gated_norm():
    args = update_arguments(POSITIONS, groups=2)
    weight = randn(args[1].shape[1], seed=9)
    gated, sums = step.state_update(*args)
    ours = reference.finish_gated_norm(gated, sums, weight, 1e-5, 2)
    same = reference.gated_rms_norm(gated, None, weight, 1e-5, 2)
    exact = reference.gated_rms_norm(gated.double(), None, weight.double(), 1e-5, 2)
    assert_bound(ours, same, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [1, 3, 21])
def test_prefill_then_decode_equals_one_prefill(prompt, dtype):
    """causal_conv1d and ssd_scan over all tokens, and over the prompt with state_update for the rest."""
    start, total, heads, groups = 11, prompt + 4, 4, 2
    made = update_arguments(range(start, start + total), heads, groups=groups, initial=False, dtype=dtype)

    def mixer(conv_form, scan_form, step_form, tokens: int, double: bool = False):
        args = [x.double() if double and x.is_floating_point() else x.clone() for x in made]
        xBC, z, dt, weight, bias, a_log, D, dt_bias, positions, windows, _, conv_out, states, _, state_out = args
        own, batch = (conv_out[:1], state_out[:1]), (cu_seqlens([tokens]), ints([start]))
        channels = conv_form(xBC[:tokens], weight, bias, *batch, windows, None, own[0])
        x, B, C = channels.split([z.shape[1], 32, 32], dim=1)
        x, B, C = x.unflatten(1, (heads, -1)), B.unflatten(1, (groups, -1)), C.unflatten(1, (groups, -1))
        y = scan_form(x, dt[:tokens], a_log, B, C, D, dt_bias, *batch, 16, states, None, own[1])
        rows = [y.flatten(1) * torch.nn.functional.silu(z[:tokens])]
        for t in range(tokens, total):
            token = [x[t : t + 1] for x in (xBC, z, dt)]
            caches = (windows, own[0], own[0], states, own[1], own[1])
            rows.append(step_form(*token, *args[3:8], positions[t : t + 1], *caches)[0])
        return torch.cat(rows), windows[own[0][0].long()], states[own[1][0].long()]

    definition = (reference.causal_conv1d, reference.ssd_scan, reference.state_update)
    exact, same = mixer(*definition, total, double=True), mixer(*definition, total)
    ours = mixer(conv.causal_conv1d, ssd.ssd_scan, step.state_update, prompt)
    for what, a, b, c in zip(("rows", "window", "state"), ours, same, exact, strict=True):
        assert_bound(a, b, c, what)


def test_offsets_beyond_32_bits():
    windows, states = far_rows(3, 4, 40), far_rows(3, 1, 8, 16, dtype=torch.float32)
    rows = far_rows(3, 40)
    rows.copy_(randn(3, 40, dtype=rows.dtype))
    weight, a_log = randn(40, 4, dtype=rows.dtype, seed=1), torch.zeros(1, device=rows.device)
    results = []
    for xBC, read, written in ((rows.contiguous(), 0, 1), (rows, 2, 0), (rows, 0, 2)):
        windows[read], states[read] = randn(4, 40, dtype=rows.dtype, seed=2), randn(1, 8, 16, seed=3)
        tables = ints([[-1], [-1], [read]]), ints([[-1], [-1], [written]])
        z, dt = xBC[:, :8], xBC[:, 8:9]
        out = step.state_update(
            xBC, z, dt, weight, None, a_log, None, None, ints([5, 6, 7]), windows, *tables, states, *tables
        )
        results.append((*out, windows[written].clone(), states[written].clone()))
    assert results[0][0][2].abs().sum() > 0
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
