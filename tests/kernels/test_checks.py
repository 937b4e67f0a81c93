"""What the public face refuses: every argument in turn, and that nothing was written by then."""

import pytest
import torch

from flexops import kernels
from flexops.kernels import checks
from tests.kernels import inputs
from tests.kernels.helpers import bits, copy_with_storage, whole_storage


def randn(*shape, seed=0):
    """On the CPU, also where the other kernel tests run on a GPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def plain_backend():
    """What does not depend on the backend is tested over the CPU forms."""
    with kernels.backend("cpu"):
        yield


def _name(operator: str, position: int) -> str:
    code = getattr(checks, operator).__code__
    return code.co_varnames[position]


def _spoiled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that cannot stand where x stands."""
    bad = {
        "dtype": x.to(torch.complex64 if x.is_floating_point() else torch.int16),
        "dims": x.unsqueeze(0),
        "device": x.to("meta"),
    }
    if x.dim() > 1 and min(x.shape[-2:]) > 1:
        bad["strides"] = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return bad


SPOILED = [
    (case, position, kind)
    for case in inputs.CASES
    for position, x in enumerate(inputs.arguments(case))
    if isinstance(x, torch.Tensor)
    for kind in _spoiled(x)
    if not (position == 0 and kind == "device")
]


@pytest.mark.parametrize(("case", "position", "kind"), SPOILED, ids=lambda v: str(v))
def test_wrong_tensors_are_refused_before_anything_is_written(case, position, kind):
    operator = inputs.operator(case)
    arguments = list(inputs.arguments(case))
    arguments[position] = _spoiled(arguments[position])[kind]
    if operator in ("rms_norm", "silu_mul") and kind == "dims" and position == 0:
        return  # any number of leading dims
    before = [bits(copy_with_storage(arguments[i])) for i in inputs.mutated(case) if i != position]
    # a call with a meta tensor goes to the fake, so that kind is shown to the check itself
    call = getattr(checks if kind == "device" else torch.ops.flexops, operator)
    with pytest.raises(ValueError, match=rf"^{_name(operator, position)}: got shape .* allowed: "):
        call(*arguments)
    after = [bits(arguments[i]) for i in inputs.mutated(case) if i != position]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _with(x, index, value):
    x = x.clone()
    x[index] = value
    return x


BAD_VALUES = {
    "rms_norm weight length": ("rms_norm", 1, lambda w: w[:-1], r"^weight: got shape \[47\].*D=48"),
    "silu_mul shapes": ("silu_mul", 1, lambda up: up[:-1], r"^up: .*T=24"),
    "gated_rms_norm groups": ("gated_rms_norm", 4, lambda n: 3, r"^n_groups: got 3; allowed: a divisor"),
    "finish_gated_norm groups": ("finish_gated_norm", 4, lambda n: 3, r"^n_groups: got 3"),
    "finish_gated_norm sums": (
        "finish_gated_norm",
        1,
        lambda s: s.bfloat16(),
        r"^sum_squares: .*allowed: dtype float32",
    ),
    "gate_pool w1": ("gate_pool", 4, lambda w: w[:, :-1], r"^w1: .*D=48"),
    "gate_pool rows overlap": ("gate_pool", 0, lambda x: x[:1].expand(24, -1), r"^residual: .*contiguous"),
    "gate_route classes": ("gate_route", 3, lambda w: w[:1], r"^w2: .*routes=2"),
    "gate_route empty": ("gate_route", 1, lambda c: _with(c, 1, 0), r"^cu_seqlens: sequence 0 has 0 rows"),
    "gate_route bias": ("gate_route", 5, lambda b: b[:-1], r"^bias: .*R=3"),
    "gather_rows high": ("gather_rows", 1, lambda i: _with(i, 0, 24), r"^index: holds 24; allowed: -1 to 23"),
    "gather_rows strided index": (
        "gather_rows",
        1,
        lambda i: torch.stack([i, i], 1)[:, 0],
        r"^index: .*contiguous memory$",
    ),
    "gather_rows low": ("gather_rows", 1, lambda i: _with(i, 0, -2), r"^index: holds -2"),
    "scatter_rows twice": (
        "scatter_rows",
        2,
        lambda i: _with(i, 0, int(i[1])),
        r"^index: holds \d+ twice; allowed: each",
    ),
    "scatter_rows high": ("scatter_rows", 2, lambda i: _with(i, 0, 24), r"^index: holds 24"),
    "split_norm twice": ("split_norm", 4, lambda i: _with(i, 3, int(i[0])), r"^order: holds \d+ twice; allowed: each"),
    "split_norm high": ("split_norm", 4, lambda i: _with(i, 0, 24), r"^order: holds 24"),
    "merge_norm high": ("merge_norm", 3, lambda i: _with(i, 0, 16), r"^inverse: holds 16; allowed: -1 to 15"),
    "apply_rope positions": ("apply_rope", 2, lambda p: _with(p, 0, 999), r"^positions: holds 999"),
    "apply_rope rotary dims": ("apply_rope", 1, lambda c: torch.cat([c, c], 1), r"^rotary_dim of cos_sin: got 32"),
    "append_kv slot": ("append_kv", 6, lambda s: _with(s, 0, 2**40), r"^slot_mapping: holds 1099511627776"),
    "append_kv slot twice": ("append_kv", 6, lambda s: _with(s, 4, int(s[9])), r"^slot_mapping: holds \d+ twice"),
    "append_kv int32 slots": ("append_kv", 6, lambda s: s.int(), r"^slot_mapping: .*allowed: dtype int64"),
    "append_kv position": ("append_kv", 4, lambda p: _with(p, 0, -1), r"^positions: holds -1"),
    "append_kv cache dtype": ("append_kv", 5, lambda c: c.half(), r"^kv_cache: .*allowed: dtype float32"),
    "append_kv head dim": ("append_kv", 0, lambda q: q[:, :, :12].contiguous(), r"^head_dim of q: got 12"),
    "attention context past pages": (
        "paged_attention",
        4,
        lambda c: _with(c, 2, 99),
        r"^context_lens: request 2 has 99",
    ),
    "attention context too short": (
        "paged_attention",
        4,
        lambda c: _with(c, 2, 17),
        r"^context_lens: request 2 has 17",
    ),
    "attention page missing": ("paged_attention", 2, lambda t: _with(t, (2, 1), -1), r"^page_table .*: holds -1"),
    "attention page too high": ("paged_attention", 2, lambda t: _with(t, (0, 0), 77), r"^page_table .*: holds 77"),
    "attention launch hint": ("paged_attention", 6, lambda n: 17, r"^max_query_len: got 17; allowed: at least .* 18"),
    "attention ends": ("paged_attention", 3, lambda c: _with(c, 3, 23), r"^cu_seqlens: runs from 0 to 23"),
    "attention order": ("paged_attention", 3, lambda c: _with(c, 1, 7), r"^cu_seqlens: sequence 1 has -1 rows"),
    "attention kv heads": ("paged_attention", 0, lambda q: q[:, :3], r"^Hk, .*: got 2; allowed: a divisor .* 3"),
    "conv width": (
        "causal_conv1d",
        1,
        lambda w: w[:, :1].contiguous(),
        r"^K, the width of weight: got 1; allowed: 2 to 4",
    ),
    "conv pages": ("causal_conv1d", 6, lambda p: p[:, :1], r"^initial_pages: .*pages=2"),
    "conv page range": ("causal_conv1d", 7, lambda p: _with(p, 0, 500), r"^final_pages: holds 500"),
    "conv page twice": ("causal_conv1d", 7, lambda p: _with(p, (0, 0), int(p[2, 1])), r"^final_pages: holds \d+ twice"),
    "conv checkpoint row twice": (
        "causal_conv1d",
        8,
        lambda r: torch.cat([r, r]),
        r"^checkpoint_rows: got shape|^checkpoint_rows: holds",
    ),
    "conv half an entry": ("causal_conv1d", 7, lambda p: _with(p, (0, 1), -1), r"^final_pages: a row has -1 behind"),
    "conv checkpoint row": ("causal_conv1d", 8, lambda p: _with(p, 0, 24), r"^checkpoint_rows: holds 24"),
    "conv cache missing": ("causal_conv1d", 5, lambda c: None, r"^initial_pages: given without conv_cache"),
    "conv checkpoint pages missing": ("causal_conv1d", 9, lambda c: None, r"^checkpoint_rows: allowed together"),
    "scan state dtype": ("ssd_scan", 10, lambda c: c.bfloat16(), r"^state_cache: .*allowed: dtype float32"),
    "scan chunk": ("ssd_scan", 9, lambda c: 48, r"^chunk_size: got 48; allowed: powers of two"),
    "scan start": ("ssd_scan", 8, lambda s: _with(s, 0, -1), r"^seq_starts: holds -1"),
    "scan checkpoint": (
        "ssd_scan",
        13,
        lambda r: r - 1,
        r"^checkpoint_rows: row 20 is followed by position 31 of request 2",
    ),
    "scan C": ("ssd_scan", 4, lambda c: c[:, :1], r"^C: .*G=2"),
    "update columns": ("state_update", 1, lambda z: z[:, :-1], r"^z: has 31 columns; allowed: H \* P = 4 \* 8"),
    "update heads": ("state_update", 5, lambda a: a[:-1], r"^A_log: .*H=4"),
    "update pages twice": (
        "state_update",
        14,
        lambda p: _with(p, (0, 0), int(p[2, 0])),
        r"^state_pages_out: holds \d+ twice; allowed: each once, but for -1",
    ),
    "update pages": ("state_update", 14, lambda p: _with(p, 0, 99), r"^state_pages_out: holds 99"),
    "decode context": ("decode_branches", 3, lambda c: _with(c, 2, 99), r"^context_lens: request 2 has 99"),
    "decode page missing": ("decode_branches", 2, lambda t: _with(t, (2, 1), -1), r"^page_table .*: holds -1"),
    "decode dtypes": ("decode_branches", 5, lambda x: x.half(), r"^xBC: .*allowed: dtype float32"),
    "decode states": ("decode_branches", 19, lambda p: _with(p, 0, 99), r"^state_pages_out: holds 99"),
    "update position": ("state_update", 8, lambda p: _with(p, 0, -5), r"^positions: holds -5"),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_wrong_values_are_refused_before_anything_is_written(what):
    operator, position, change, message = BAD_VALUES[what]
    arguments = list(inputs.arguments(operator))
    arguments[position] = change(arguments[position])
    mutated = [arguments[i] for i in inputs.mutated(operator) if arguments[i] is not None]
    before = [bits(whole_storage(x)).clone() for x in mutated]
    with pytest.raises(ValueError, match=message):
        getattr(kernels, operator)(*arguments)
    assert all(torch.equal(bits(whole_storage(x)), b) for x, b in zip(mutated, before, strict=True))


def test_minus_one_and_what_is_only_read_may_stand_twice():
    x = randn(4, 16)
    assert torch.equal(kernels.gather_rows(x, ints([2, 2, -1, -1])), torch.stack([x[2], x[2], x[0] * 0, x[0] * 0]))
    out = kernels.scatter_rows(torch.zeros(4, 16), x[:3], ints([-1, 1, -1]))
    assert torch.equal(out[1], x[1]) and not out[[0, 2, 3]].any()


def test_empty_batches_are_accepted():
    empty = torch.empty(0, 16)
    assert kernels.rms_norm(empty, torch.ones(16), 1e-5).shape == (0, 16)
    assert kernels.gather_rows(randn(4, 16), ints([])).shape == (0, 16)
    assert kernels.split_norm(empty.clone(), None, torch.ones(16), 1e-5, ints([])).shape == (0, 16)
    q = torch.empty(0, 4, 16)
    cache, table = torch.zeros(2, 2, 2, 16, 16), torch.empty(0, 3, dtype=torch.int32)
    assert kernels.paged_attention(q, cache, table, ints([0]), ints([]), 1.0, 1).shape == (0, 4, 16)
