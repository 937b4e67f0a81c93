"""The CPU forms against the definition, and bit for bit against themselves: batched, cut, permuted, threaded."""

import dataclasses
import functools
import hashlib

import numba
import pytest
import torch
from torch import Tensor

from flexops.kernels import cpu, cpu_launch, cpu_rows, reference
from flexops.kernels.cpu_launch import kernel, unpack
from flexops.kernels.cpu_simd import exp, load, read_row, scratch, silu, softplus, store, write_row
from tests.kernels import inputs
from tests.kernels.helpers import bits, check, cu_seqlens, ints, page_tables, pages, randn, rows_of_projection

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
ODD = inputs.Size(  # nothing is a multiple of a vector
    lengths=(7, 1, 2, 35),
    cached=(0, 4, 9, 30),
    hidden=100,
    ffn=72,
    q_heads=6,
    kv_heads=2,
    head_dim=40,
    page_tokens=5,
    ssm_heads=6,
    ssm_head_dim=24,
    groups=3,
    d_state=20,
    d_conv=3,
    gate_dim=20,
    chunk_size=16,
    heads_per_page=4,
)
WIDE = inputs.Size(  # several tiles, blocks and accumulators of everything
    lengths=(40, 3, 66),
    cached=(100, 61, 0),
    hidden=1100,
    ffn=1200,
    q_heads=8,
    kv_heads=2,
    head_dim=128,
    page_tokens=16,
    ssm_heads=4,
    ssm_head_dim=64,
    groups=1,
    d_state=128,
    chunk_size=64,
    heads_per_page=1,
)
ABSENT = {  # sets of positions of optional arguments
    "gate_pool": [(1,)],
    "split_norm": [(1,)],
    "gated_rms_norm": [(1,)],
    "gate_route": [(5,)],
    "append_kv": [(3,)],
    "causal_conv1d": [(2,), (5, 6, 7, 8, 9), (6,), (7, 8, 9)],
    "ssd_scan": [(5, 6), (10, 11, 12, 13, 14), (11,), (12, 13, 14)],
    "state_update": [(4, 6, 7)],
}
SIZES = [pytest.param(inputs.TINY, id="tiny"), pytest.param(ODD, id="odd"), pytest.param(WIDE, id="wide")]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request, monkeypatch):
    """Run with so many threads, however little there is to do."""
    monkeypatch.setattr(cpu_launch, "FORK_FROM", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run(name: str, arguments) -> tuple[tuple[Tensor, ...], list]:
    """The results of an operator on copies of its arguments, and the copies."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    result = getattr(cpu, name)(*copies)
    return result if isinstance(result, tuple) else (result,), copies


def assert_same(a: Tensor, b: Tensor) -> None:
    """The same bits, NaN and signs of zeros included."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


# --- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", inputs.CASES)
def test_values(case, dtype, size):
    name = inputs.operator(case)
    arguments = inputs.arguments(case, size, dtype)
    check(getattr(cpu, name), getattr(reference, name), *arguments, mutated=inputs.mutated(case))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, id="fp16"), pytest.param(torch.float64, id="fp64")])
@pytest.mark.parametrize("case", inputs.CASES)
def test_other_dtypes_run_the_definition(case, dtype):
    name = inputs.operator(case)
    arguments = inputs.arguments(case, inputs.TINY, dtype)
    ours, _ = run(name, arguments)
    theirs = getattr(reference, name)(*[x.clone() if isinstance(x, Tensor) else x for x in arguments])
    for a, b in zip(ours, theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("case", ["rms_norm", "gated_rms_norm", "gate_pool", "split_norm", "merge_norm", "gate_route"])
def test_parameters_in_another_dtype_than_activations(case):
    arguments = [
        x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 and x.dim() == 1 else x
        for x in inputs.arguments(case, ODD, torch.bfloat16)
    ]
    check(getattr(cpu, case), getattr(reference, case), *arguments, mutated=inputs.mutated(case))


@pytest.mark.parametrize("case, absent", [(case, absent) for case, sets in ABSENT.items() for absent in sets])
@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_arguments(case, absent, dtype):
    arguments = [None if i in absent else x for i, x in enumerate(inputs.arguments(case, ODD, dtype))]
    check(getattr(cpu, case), getattr(reference, case), *arguments, mutated=inputs.mutated(case))


def test_rms_norm_of_heads():
    x = rows_of_projection(5, 3, 24, seed=1)
    check(cpu.rms_norm, reference.rms_norm, x, randn(24, seed=2), 1e-5)


def test_indices_of_64_bits():
    x, index = randn(6, 10, seed=1), torch.tensor([3, -1, 0])
    assert_same(cpu.gather_rows(x, index), reference.gather_rows(x, index))
    out = cpu.scatter_rows(x.clone(), randn(3, 10, seed=2), index)
    assert_same(out, reference.scatter_rows(x.clone(), randn(3, 10, seed=2), index))


@pytest.mark.parametrize("case", ["rms_norm", "silu_mul", "gated_rms_norm", "gather_rows", "apply_rope"])
def test_no_rows(case):
    arguments = [
        x[:0] if isinstance(x, Tensor) and x.shape[0] == inputs.TINY.tokens else x for x in inputs.arguments(case)
    ]
    if case == "gather_rows":
        arguments[1] = arguments[1][:0]
    (out,), _ = run(case, arguments)
    assert out.shape[0] == 0


def test_nan_and_infinity_pass_through():
    gate = torch.tensor([[float("nan"), float("inf"), -float("inf"), 200.0, -200.0, 1.0]])
    out = cpu.silu_mul(gate, torch.ones_like(gate))[0]
    assert out[0].isnan() and out[1] == torch.inf and out[3] == 200 and out[4] == 0
    x = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    out = cpu.rms_norm(x.bfloat16(), torch.ones(3), 1e-5)
    assert out[0].isnan().all() and not out[1].isnan().any()


# --- functions ------------------------------------------------------------------------------------------------


@kernel(5)
def _apply_function(arguments):
    which, x, code, out, count = unpack(arguments, 0, 5)
    row = scratch(count + 64)
    read_row(row, x, code, count)
    for i in range(0, count, 16):
        value = load(row, i)
        if which == 0:
            value = exp(value)
        elif which == 1:
            value = softplus(value)
        else:
            value = silu(value)
        store(row, i, value)
    write_row(out, code, row, count)


FUNCTIONS = {
    "exp": (0, torch.exp),
    "softplus": (1, reference.softplus),
    "silu": (2, lambda x: x / (1 + torch.exp(-x))),
}


def apply_function(name: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _apply_function(0, FUNCTIONS[name][0], x.data_ptr(), x.element_size(), out.data_ptr(), x.numel())
    return out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_exact_as_those_of_torch(name):
    low = -87.0 if name == "exp" else -60.0  # below it the results are not normal numbers, or lose them on the way
    x = torch.cat([torch.linspace(low, 88.0, 40000), torch.linspace(-20, 20, 20000), randn(20000, seed=1)])
    exact = FUNCTIONS[name][1](x.double())
    unit = torch.finfo(torch.float32).eps * exact.abs()
    error, theirs = (
        ((y.double() - exact) / unit).abs().max() for y in (apply_function(name, x), FUNCTIONS[name][1](x))
    )
    assert error <= 2 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_same_bits_at_every_place(name, dtype):
    x = randn(220, seed=2, scale=5.0, dtype=dtype)
    whole = apply_function(name, x)
    for length in range(1, 101):
        for start in (0, 1, 3, 7, 8, 15, 16, 100):
            assert_same(apply_function(name, x[start : start + length]), whole[start : start + length])


# --- bits -----------------------------------------------------------------------------------------------------

ROWWISE = {  # positions of the arguments that are rows, and of the argument that is updated in place
    "rms_norm": (0,),
    "silu_mul": (0, 1),
    "gated_rms_norm": (0, 1),
    "finish_gated_norm": (0, 1),
    "gate_pool": (0, 1),
    "apply_rope": (0, 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ROWWISE)
def test_a_row_is_the_same_alone_and_in_any_order(case, size, dtype, threads):
    arguments = inputs.arguments(case, size, dtype)
    rows = arguments[0].shape[0]
    whole, after = run(case, arguments)

    def compare(index: Tensor) -> None:
        some = [x[index] if i in ROWWISE[case] else x for i, x in enumerate(arguments)]
        part, part_after = run(case, some)
        for a, b in zip((*whole, after[0]), (*part, part_after[0]), strict=True):
            assert_same(a[index], b)

    for r in range(min(rows, 9)):
        compare(torch.tensor([r]))
    compare(torch.randperm(rows))
    compare(torch.arange(rows // 2, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_split_and_merge_do_to_each_row_what_the_plain_norm_does(size, dtype, threads):
    residual, delta, weight, eps, order = inputs.arguments("split_norm", size, dtype)
    (u,), after = run("split_norm", (residual, delta, weight, eps, order))
    added = residual + delta
    plain = cpu.rms_norm(added, weight, eps)
    named = order >= 0
    assert_same(u[named], plain[order[named].long()])
    assert_same(after[0][order[named].long()], added[order[named].long()])
    inverse = torch.full((len(residual),), -1, dtype=torch.int32)
    inverse[order[named].long()] = torch.arange(len(order), dtype=torch.int32)[named]
    y, cut = delta[order.clamp(min=0).long()], len(order) // 3
    (merged,), after = run("merge_norm", (residual, y[:cut], y[cut:], inverse, weight, eps))
    expected = torch.where((inverse >= 0).unsqueeze(-1), added, residual)
    assert_same(after[0], expected)
    assert_same(merged, cpu.rms_norm(expected, weight, eps))


@pytest.mark.parametrize("gate_dim", [16, 20])
def test_a_route_does_not_depend_on_the_batch(gate_dim, threads):
    lengths = [1, 64, 65, 200, 3, 63]
    size = dataclasses.replace(inputs.TINY, lengths=tuple(lengths), cached=(0,) * 6, gate_dim=gate_dim)
    z, cu, *weights, bias = inputs.arguments("gate_route", size)
    (probs, routes), _ = run("gate_route", (z, cu, *weights, bias))
    for r, n in enumerate(lengths):
        rows = z[cu[r] : cu[r + 1]]
        alone = cpu.gate_route(rows, cu_seqlens([n]), *weights, bias[r : r + 1])
        assert_same(alone[0], probs[r : r + 1])
        assert_same(alone[1], routes[r : r + 1])


def test_a_tie_goes_to_the_ssm():
    z, zeros = randn(5, 16, seed=1), torch.zeros(2, 16)
    probs, routes = cpu.gate_route(z, cu_seqlens([5]), torch.zeros(16), zeros, torch.zeros(2), None)
    assert routes.tolist() == [reference.SSM] and probs.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("threads", [2, 3], indirect=True)
@pytest.mark.parametrize("case", inputs.CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(case, dtype, threads, monkeypatch):
    name, arguments = inputs.operator(case), inputs.arguments(case, WIDE, dtype)
    results, after = run(name, arguments)
    monkeypatch.setattr(cpu_launch, "_fork", None)
    alone, alone_after = run(name, arguments)
    for a, b in zip(results, alone, strict=True):
        assert_same(a, b)
    for i in inputs.mutated(case):
        assert_same(after[i], alone_after[i])


# --- attention ------------------------------------------------------------------------------------------------


def attention_arguments(lengths, contexts, q_heads, kv_heads, head_dim, page_tokens, dtype, seed=0):
    """Scattered pages, NaN behind every context."""
    counts = [-(-n // page_tokens) for n in contexts]
    table = page_tables(counts, sum(counts) + 1, seed, width=max(counts) + 1)
    cache = pages(sum(counts) + 1, 2, kv_heads, page_tokens, head_dim, dtype=dtype)
    for r, context in enumerate(contexts):
        kv = randn(context, 2, kv_heads, head_dim, dtype=dtype, seed=100 + r)
        for j in range(context):
            cache[table[r, j // page_tokens], :, :, j % page_tokens] = kv[j]
    q = rows_of_projection(sum(lengths), q_heads, head_dim, dtype=dtype, seed=50)
    return q, cache, table, cu_seqlens(lengths), ints(contexts), head_dim**-0.5, max(lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_heads, kv_heads, head_dim", [(8, 2, 64), (4, 4, 80), (3, 1, 40), (2, 1, 256), (70, 1, 16)])
def test_attention_values_with_empty_queries(q_heads, kv_heads, head_dim, dtype):
    arguments = attention_arguments([3, 0, 1, 70], [3, 0, 17, 200], q_heads, kv_heads, head_dim, 16, dtype)
    check(cpu.paged_attention, reference.paged_attention, *arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_heads, kv_heads, head_dim, page_tokens", [(8, 2, 64, 16), (3, 3, 40, 7), (6, 3, 80, 32)])
def test_attention_has_the_same_bits_however_queries_are_cut(q_heads, kv_heads, head_dim, page_tokens, dtype, threads):
    lengths, contexts = [70, 9], [70, 140]
    arguments = attention_arguments(lengths, contexts, q_heads, kv_heads, head_dim, page_tokens, dtype)
    q, cache, table, cu, _, scale, _ = arguments
    whole = cpu.paged_attention(*arguments)
    for r, (n, context) in enumerate(zip(lengths, contexts, strict=True)):
        rows, expected = q[cu[r] : cu[r + 1]], whole[cu[r] : cu[r + 1]]
        for cut in range(1, n, 1 if threads == 1 else 5):
            head = (rows[:cut], cache, table[r : r + 1], ints([0, cut]), ints([context - n + cut]), scale, cut)
            tail = (rows[cut:], cache, table[r : r + 1], ints([0, n - cut]), ints([context]), scale, n - cut)
            assert_same(torch.cat([cpu.paged_attention(*head), cpu.paged_attention(*tail)]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_in_pages_of_any_size_and_blind_to_later_tokens(dtype):
    sizes = [attention_arguments([30], [130], 4, 2, 64, page_tokens, dtype) for page_tokens in (1, 16, 200)]
    results = [cpu.paged_attention(*arguments) for arguments in sizes]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    q, cache, table, *rest = sizes[1]
    cache[table[0, 8], :, :, 1] = torch.inf  # the last token, seen by the last query only
    assert_same(cpu.paged_attention(q, cache, table, *rest)[:-1], results[0][:-1])


# --- SSM ------------------------------------------------------------------------------------------------------

HEADS, HEAD_DIM, GROUPS, STATE, WIDTH = 4, 24, 2, 48, 4
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATE


@functools.cache
def ssm_weights() -> dict[str, Tensor]:
    return {
        "conv": randn(CHANNELS, WIDTH, seed=1),
        "conv_bias": randn(CHANNELS, seed=2),
        "A_log": randn(HEADS, seed=3),
        "D": randn(HEADS, seed=4),
        "dt_bias": randn(HEADS, seed=5),
    }


def ssm_caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for four entries each."""
    return pages(12, WIDTH, 100, dtype=dtype), pages(16, 1, HEAD_DIM, STATE)


CONV_PAGES, STATE_PAGES = ints([[7, 2, 4], [0, 1, 3]]), ints([[5, 9, 1, 2], [0, 3, 4, 6]])


def mixer(xBC, dt, start, caches, resume: bool, checkpoints=(), entry=0):
    """Convolution and scan of one sequence, from and to entry 0; checkpoints go to entry 1."""
    w, n, (conv_cache, state_cache) = ssm_weights(), len(xBC), caches
    conv_pages, state_pages = CONV_PAGES[entry : entry + 1], STATE_PAGES[entry : entry + 1]
    rows = ints(list(checkpoints)) if checkpoints else None
    first = (conv_pages, conv_pages) if resume else (None, conv_pages)
    saved = (rows, CONV_PAGES[1:]) if checkpoints else (None, None)
    conv = cpu.causal_conv1d(xBC, w["conv"], w["conv_bias"], ints([0, n]), ints([start]), conv_cache, *first, *saved)
    x, B, C = conv.split([HEADS * HEAD_DIM, GROUPS * STATE, GROUPS * STATE], dim=1)
    first = (state_pages, state_pages) if resume else (None, state_pages)
    saved = (rows, STATE_PAGES[1:]) if checkpoints else (None, None)
    return cpu.ssd_scan(
        x.unflatten(1, (HEADS, -1)), dt, w["A_log"], B.unflatten(1, (GROUPS, -1)), C.unflatten(1, (GROUPS, -1)),
        w["D"], w["dt_bias"], ints([0, n]), ints([start]), 16, state_cache, *first, *saved,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mixer_has_the_same_bits_however_a_sequence_is_cut(dtype, threads):
    n, start = 70, 11
    xBC = rows_of_projection(n, CHANNELS, dtype=dtype, seed=7)
    dt = rows_of_projection(n, HEADS, dtype=dtype, seed=8)
    whole_caches = ssm_caches(dtype)
    whole = mixer(xBC, dt, start, whole_caches, resume=False)
    for cut in range(1, n):
        caches = ssm_caches(dtype)
        head = mixer(xBC[:cut], dt[:cut], start, caches, resume=False)
        tail = mixer(xBC[cut:], dt[cut:], start + cut, caches, resume=True)
        assert_same(torch.cat([head, tail]), whole)
        for ours, expected in zip(caches, whole_caches, strict=True):
            assert_same(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_is_the_state_of_a_sequence_cut_there(dtype):
    n = 70
    xBC, dt = rows_of_projection(n, CHANNELS, dtype=dtype, seed=7), rows_of_projection(n, HEADS, dtype=dtype, seed=8)
    for row in (0, 1, 31, 32, 50, 69):
        caches, short = ssm_caches(dtype), ssm_caches(dtype)
        mixer(xBC, dt, 0, caches, resume=False, checkpoints=(row,))
        mixer(xBC[: row + 1], dt[: row + 1], 0, short, resume=False, entry=1)
        for ours, expected, table in zip(caches, short, (CONV_PAGES, STATE_PAGES), strict=True):
            assert_same(ours[table[1].long()], expected[table[1].long()])


def token(xBC, z, dt, position, caches, conv_in, conv_out, state_in, state_out):
    w = ssm_weights()
    return cpu.state_update(
        *(xBC, z, dt, w["conv"], w["conv_bias"], w["A_log"], w["D"], w["dt_bias"], position),
        *(caches[0], conv_in, conv_out, caches[1], state_in, state_out),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scan_continued_by_single_tokens_equals_one_scan(dtype, threads):
    n, cut = 40, 33
    xBC, dt = rows_of_projection(n, CHANNELS, dtype=dtype, seed=7), rows_of_projection(n, HEADS, dtype=dtype, seed=8)
    z = randn(n, HEADS * HEAD_DIM, dtype=dtype, seed=9)
    whole, caches = ssm_caches(dtype), ssm_caches(dtype)
    y = mixer(xBC, dt, 5, whole, resume=False)
    mixer(xBC[:cut], dt[:cut], 5, caches, resume=False)
    tables = (CONV_PAGES[:1], CONV_PAGES[:1], STATE_PAGES[:1], STATE_PAGES[:1])
    for t in range(cut, n):
        out, _ = token(xBC[t : t + 1], z[t : t + 1], dt[t : t + 1], ints([5 + t]), caches, *tables)
        expected = y[t].flatten().float() * torch.nn.functional.silu(z[t].float())
        torch.testing.assert_close(out[0].float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for ours, expected in zip(caches, whole, strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_a_decoded_token_is_the_same_alone(size, dtype, in_place, threads):
    arguments = list(inputs.arguments("state_update", size, dtype))
    if in_place:
        for tables in ((10, 11), (13, 14)):
            arguments[tables[0]][0] = arguments[tables[1]][0]  # the first request has pages of its own to write only
            arguments[tables[1]] = arguments[tables[0]]
        for cache, table in ((9, 10), (12, 13)):
            fresh = arguments[table][0].long()
            arguments[cache][fresh] = randn(*arguments[cache][fresh].shape, dtype=arguments[cache].dtype, seed=3)
    whole, after = run("state_update", arguments)
    alone = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    per_request = (0, 1, 2, 8, 10, 11, 13, 14)
    for r in reversed(range(size.requests)):
        some = [x[r : r + 1] if i in per_request else x for i, x in enumerate(alone)]
        for a, b in zip(cpu.state_update(*some), whole, strict=True):
            assert_same(a, b[r : r + 1])
    for i in (9, 12):
        assert_same(alone[i], after[i])


# --- compilation ----------------------------------------------------------------------------------------------


def test_kernels_come_from_the_disk_when_they_were_compiled_before():
    cpu.gather_rows(randn(2, 4), ints([1]))
    again = cpu_launch.Kernel(cpu_rows._gather_rows._function, 6, 0)
    assert again._compiled.cache_hits == 1


def test_an_edit_of_the_shared_files_invalidates_the_disk():
    assert cpu_launch._arguments.name.endswith(hashlib.sha256(cpu_launch._sources).hexdigest())
    assert isinstance(cpu_launch._arguments, numba.types.Opaque)
