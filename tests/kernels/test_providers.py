"""Wiring tests of the optional providers against fake modules: what they compute is theirs to prove, on a GPU."""

import sys
import types

import pytest
import torch

from flexops.kernels import providers, reference, training
from flexops.kernels.providers import FLASH_ATTENTION, MAMBA_SSM, OURS, CallShape, Providers, ProviderTable
from tests.kernels.helpers import cu_seqlens, ints, page_tables, pages, randn

CUDA = torch.device("cuda")  # a name only: no tensor is put there


@pytest.fixture
def fakes(monkeypatch):
    """Modules that look like flash-attn and mamba-ssm and compute with torch on the CPU."""
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, *, softmax_scale, causal):
        assert causal and torch.equal(cu_q, cu_k) and longest_q == longest_k == int(cu_q.diff().max())
        calls.append(FLASH_ATTENTION)
        return training.varlen_attention(q, k, v, cu_q, softmax_scale)

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, *, D, dt_bias, dt_softplus, return_final_states):
        assert dt_softplus and return_final_states and chunk_size == 16
        calls.append(MAMBA_SSM)
        requests, length, heads, dim = x.shape
        state_cache = torch.zeros(requests, heads, dim, B.shape[-1])
        x, dt, B, C = (t.flatten(0, 1) for t in (x, dt, B, C))
        y = reference.ssd_scan(
            x, dt, (-A).log(), B, C, D, dt_bias, cu_seqlens([length] * requests), ints([0] * requests), chunk_size,
            state_cache, None, ints([[r] for r in range(requests)]),
        )  # fmt: skip
        return y.unflatten(0, (requests, length)), state_cache

    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    ssd_combined = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    ssd_combined.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for module in (
        flash_attn,
        ssd_combined,
        *map(types.ModuleType, ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.fixture
def attention_call():
    lengths = (5, 9)
    q, k, v = (randn(14, heads, 16, seed=seed).bfloat16() for seed, heads in enumerate((4, 2, 2)))
    return q, k, v, cu_seqlens(lengths), 0.25, 9


@pytest.fixture
def scan_call():
    x, dt = randn(20, 3, 8), randn(20, 3, seed=1)
    B, C = randn(20, 1, 16, seed=2), randn(20, 1, 16, seed=3)
    weights = randn(3, seed=4), B, C, randn(3, seed=5), randn(3, seed=6)
    return [x, dt, *weights, [10, 10], 16, pages(8, 2, 8, 16), page_tables([2, 2], 8)]


def tables(attention=FLASH_ATTENTION, scan=MAMBA_SSM):
    """A table in which these won for the shapes of the two calls above."""
    table = ProviderTable("a device")
    table.times_us[CallShape("prefill_attention", torch.bfloat16, (4, 16, 2), 14, 9).key] = {OURS: 2.0, attention: 1.0}
    table.times_us[CallShape("prefill_scan", torch.float32, (3, 8, 1, 16, 16), 20, 10).key] = {OURS: 2.0, scan: 1.0}
    return table


def test_flash_attention_runs_where_it_is_faster(fakes, attention_call):
    result = Providers(tables(), CUDA, deterministic=False).prefill_attention(*attention_call)
    assert fakes == [FLASH_ATTENTION]
    assert torch.equal(result, training.varlen_attention(*attention_call[:5]))


def test_mamba_scan_runs_where_it_is_faster_and_leaves_states_in_pages(fakes, scan_call):
    result = Providers(tables(), CUDA, deterministic=False).prefill_scan(*scan_call)
    assert fakes == [MAMBA_SSM]
    *inputs, _lengths, chunk_size, cache, final_pages = scan_call
    expected = pages(8, 2, 8, 16)
    y = reference.ssd_scan(
        *inputs, cu_seqlens([10, 10]), ints([0, 0]), chunk_size, expected, None, final_pages
    )  # fmt: skip
    torch.testing.assert_close(result, y)
    torch.testing.assert_close(cache, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("table", "device", "deterministic"),
    [
        pytest.param(tables(), CUDA, True, id="deterministic"),
        pytest.param(tables(), torch.device("cpu"), False, id="cpu"),
        pytest.param(tables(attention=OURS, scan=OURS), CUDA, False, id="ours is faster"),
        pytest.param(ProviderTable("a device"), CUDA, False, id="not measured"),
    ],
)
def test_ours_runs_otherwise(fakes, attention_call, scan_call, table, device, deterministic):
    chosen = Providers(table, device, deterministic)
    assert chosen.prefill_attention(*attention_call) is None
    assert chosen.prefill_scan(*scan_call) is None
    assert fakes == []


def test_ours_runs_for_calls_a_provider_cannot_take(fakes, attention_call, scan_call):
    chosen = Providers(tables(), CUDA, deterministic=False)
    fp32 = [t.float() for t in attention_call[:3]]
    assert chosen.prefill_attention(*fp32, *attention_call[3:]) is None
    for lengths in ([9, 11], [], [0]):
        scan_call[7] = lengths
        assert chosen.prefill_scan(*scan_call) is None
    assert fakes == []


def test_packages_that_are_missing_or_broken_are_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    assert providers.flash_attention() is None and providers.mamba_scan() is None
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert providers.flash_attention() is None


def test_table_measures_saves_and_loads(tmp_path):
    table, path = ProviderTable("one"), tmp_path / "providers.json"
    shape = CallShape("prefill_attention", torch.float16, (4, 16, 2), 1000, 100)
    table.measure(shape, {OURS: lambda: 3.0, FLASH_ATTENTION: lambda: 1.0}, time_us=lambda side: side())
    table.save(path)
    loaded = ProviderTable.load(path, "one")
    assert loaded == table and loaded.fastest(shape) == FLASH_ATTENTION
    assert loaded.fastest(CallShape("prefill_attention", torch.float16, (4, 16, 2), 1024, 128)) == FLASH_ATTENTION
    assert loaded.fastest(CallShape("prefill_attention", torch.float16, (4, 16, 2), 1025, 128)) == OURS
    assert ProviderTable.load(path, "another").times_us == {}
    assert ProviderTable.load(tmp_path / "none.json", "one").times_us == {}
    table.times_us[shape.key] = {FLASH_ATTENTION: 1.0, OURS: 1.0}
    assert table.fastest(shape) == OURS
