"""Taking a profile on this CPU: the batches drawn, that they run as the executor's do, and what is timed."""

import time

import numpy as np
import pytest
import torch

from flexops.kernels import ATTENTION, SSM
from flexops.models.packed import PackedModel
from flexops.runtime import measuring
from flexops.runtime.measuring import BranchRunner, draw_loads, measure, profile_model, time_us
from flexops.runtime.profiling import FFN, PART_NAMES, BranchLoad, profile_key
from tests import tiny


@pytest.fixture(scope="module")
def model():
    with torch.no_grad():
        return PackedModel(tiny.make_model(), 512)


def test_batches_cover_decodes_prefills_and_both():
    loads = draw_loads(200, 16, 400, 1000, np.random.default_rng(0))
    kinds = [(bool(load.num_decodes), bool(load.prefill_tokens)) for load in loads]
    assert [kinds.count(kind) for kind in ((True, False), (False, True), (True, True))] == [100, 50, 50]
    assert max(load.num_decodes for load in loads) == 16 and min(len(load.counts) for load in loads) == 1
    assert max(int(load.starts.max()) for load in loads) > 800
    prefills = [load for load in loads if load.prefill_tokens]
    assert 200 < max(load.prefill_tokens for load in prefills) <= 400
    behind = [(load.starts[load.num_decodes :] > 0).any() for load in prefills]
    assert 0.4 < np.mean(behind) < 0.9


def attention_by_hand(model, runner, load, hidden):
    """The branch's results from its projections, with torch's own attention over the keys in the pool."""
    branch, batch = model.layers[0].attention, runner._attention_batch(load)
    branch(hidden, batch, model.cos_sin, runner.pool.kv_cache, runner.ops)
    q = branch.append(hidden, batch, model.cos_sin, runner.pool.kv_cache, runner.ops)
    rows = []
    for r, (start, end) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)):
        context = int(batch.context_lens[r])
        pages = batch.page_table[r][batch.page_table[r] >= 0].long()
        kv = runner.pool.kv_cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        seen = torch.ones(end - start, context, dtype=torch.bool).tril(context - (end - start))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1), *kv, attn_mask=seen, scale=branch.scale, enable_gqa=True
        )
        rows.append(attended.transpose(0, 1).flatten(1))
    return branch.out(torch.cat(rows))


def test_a_load_runs_the_branch_over_its_own_pages(model):
    load = BranchLoad.of(decodes=[0, 40], prefills=[(20, 0), (3, 33)])
    runner = BranchRunner(model, [load])
    hidden = torch.randn(load.tokens, model.config.hidden_size)
    batch = runner._attention_batch(load)
    used = batch.page_table[batch.page_table >= 0].tolist()
    assert len(set(used)) == len(used), "a page of two requests"
    with torch.inference_mode():
        out = model.layers[0].attention(hidden, batch, model.cos_sin, runner.pool.kv_cache, runner.ops)
        torch.testing.assert_close(out, attention_by_hand(model, runner, load, hidden), rtol=1e-4, atol=1e-4)


def test_the_ssm_branch_continues_where_there_is_a_prefix(model):
    load = BranchLoad.of(decodes=[7], prefills=[(5, 0), (6, 9)])
    runner = BranchRunner(model, [load])
    batch = runner._ssm_batch(load)
    assert batch.positions.tolist() == [7] and batch.cu_seqlens.tolist() == [0, 5, 11]
    assert batch.seq_starts.tolist() == [0, 9]
    assert (batch.initial_state_pages[0] == -1).all() and (batch.initial_conv_pages[0] == -1).all()
    assert torch.equal(batch.initial_state_pages[1], batch.state_pages[2])
    pages = torch.cat([batch.state_pages.flatten(), batch.conv_pages.flatten()]).tolist()
    assert len(set(pages)) == len(pages) and not set(pages) & set(runner.kv_pages)
    call = runner.prepare(SSM, load)
    with torch.inference_mode():
        assert call().shape == (12, model.config.hidden_size) and call().isfinite().all()


def test_what_follows_the_branches_leaves_its_rows_as_they_are(model):
    """However often it runs: rows that grew would end in numbers that take another time."""
    load = BranchLoad.of(decodes=[7, 3], prefills=[(5, 0)])
    call = BranchRunner(model, [load]).prepare(FFN, load)
    with torch.inference_mode():
        outs = [call() for _ in range(2 * len(model.layers))]
    hidden = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(7))
    for i, out in enumerate(outs):
        layer = model.layers[i % len(model.layers)]
        normed = torch.nn.functional.rms_norm(hidden, hidden.shape[1:], layer.ffn_norm, model.eps)
        gate, up = layer.ffn.gate_up(normed).chunk(2, dim=-1)
        torch.testing.assert_close(out, layer.ffn.down(torch.nn.functional.silu(gate) * up), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("routes", "ffn", "parts"), [("attention", 48, [ATTENTION, FFN]), ("ssm", 0, [SSM]), ("adaptive", 48, [0, 1, FFN])]
)
def test_the_parts_that_a_model_has(routes, ffn, parts):
    made = tiny.make_model(layer_routes=[routes] * 3, intermediate_size=ffn)
    with torch.no_grad():
        runner = BranchRunner(PackedModel(made, 512), [BranchLoad.of([3])])
    assert runner.parts == parts
    key = profile_key(made.config, torch.float32, torch.device("cpu"))
    assert key["parts"] == [PART_NAMES[part] for part in parts]


def test_layers_take_turns(model, monkeypatch):
    ran = []
    for i, layer in enumerate(model.layers):
        monkeypatch.setattr(layer, "ssm", lambda *_, i=i: ran.append(i))
    call = BranchRunner(model, [BranchLoad.of([3])]).prepare(SSM, BranchLoad.of([3]))
    for _ in range(5):
        call()
    assert ran == [0, 1, 2, 0, 1]


def test_every_round_times_every_batch_once_in_an_order_of_its_own(model, monkeypatch):
    loads = draw_loads(4, 2, 8, 20, np.random.default_rng(0))
    clock = iter(range(10**6))
    monkeypatch.setattr(measuring, "time_us", lambda run, device: (float(next(clock)), 7.0))
    rounds = []
    samples = measure(model, loads, 5, 1e9, lambda *done: rounds.append(done))
    assert rounds == [(n, 5) for n in range(1, 6)]
    assert [s.part for s in samples] == [ATTENTION] * 4 + [SSM] * 4 + [FFN] * 4
    assert all(24 <= s.us < 36 for s in samples), "the median of five runs is of the third round"
    assert len({s.us for s in samples}) == 12, "each has its own place in the round"
    assert [s.us for s in samples] != sorted(s.us for s in samples)
    assert all((s.wall_us, s.wall_spread) == (7.0, 0.0) and s.spread > 0 for s in samples)


def test_time_that_others_take_does_not_count_where_there_is_one_thread():
    def waits() -> None:
        time.sleep(0.05)

    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        own, wall = time_us(waits, cpu)
        assert own < 20_000 and wall >= 50_000
        torch.set_num_threads(2)
        own, wall = time_us(waits, cpu)
        assert own == wall >= 50_000
    finally:
        torch.set_num_threads(threads)


def test_it_ends_after_three_rounds_when_time_is_up(model):
    rounds = []
    measure(model, draw_loads(4, 2, 8, 20, np.random.default_rng(0)), 50, 0.0, lambda *done: rounds.append(done))
    assert rounds == [(1, 50), (2, 50), (3, 50)]


def test_profile_of_a_model(model):
    profile = profile_model(model, max_context=64, batches=40, max_requests=4, max_tokens=32, rounds=3)
    assert profile.key == profile_key(model.config, torch.float32, torch.device("cpu"))
    for part, name in PART_NAMES.items():
        assert profile.held_out[name].count == 10 and profile.held_out[name].spread > 0
        small, large = (profile.predict_us(part, BranchLoad.of(prefills=[(n, 0)]), model.config) for n in (2, 32))
        assert 1 < small < large < 1e6
