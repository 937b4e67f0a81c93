"""FLOPs by Eq. 6, and the engine's numbers as prometheus metrics."""

import pytest

from flexops import FlexHybridConfig
from flexops.kernels import ATTENTION, SSM
from flexops.runtime import SamplingParams
from flexops.runtime.metrics import EngineCollector, decode_flops
from tests.runtime.serving import Asked, serve, small_engine
from tests.tiny import make_model


def test_flops_of_a_decode_step():
    config = FlexHybridConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_n_heads=2,
        mamba_d_head=32,
        mamba_d_state=16,
        layers_without_ffn=[2],
    )
    attention = 64 * 16 * (2 * 4 + 2 * 2)
    ssm = 64 * (64 + 96 + 2) + 64 * 64 + 96 * 4 + 3 * 64 * 16
    head, ffn = 64 * 1000, 3 * 64 * 128
    constant, per_token = decode_flops(config, [ATTENTION, SSM, SSM])
    assert constant == 2.0 * (attention + 2 * ssm + head + 2 * ffn)
    assert per_token == 4.0 * 4 * 16, "scores and values of every query head"
    assert decode_flops(config, [SSM] * 3) == (2.0 * (3 * ssm + head + 2 * ffn), 0.0)


def test_prometheus_sees_what_stats_count():
    prometheus_client = pytest.importorskip("prometheus_client")
    engine = small_engine(make_model())
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine.stats))
    serve(
        engine,
        [Asked((1, 2, 3), SamplingParams(max_new_tokens=4), "ssm"), Asked((4,), SamplingParams(max_new_tokens=2))],
    )
    assert registry.get_sample_value("flexops_generated_tokens_total") == 6
    assert registry.get_sample_value("flexops_requests_finished_total", {"reason": "length"}) == 2
    assert registry.get_sample_value("flexops_layouts_total", {"layout": "SSS"}) >= 1
    assert registry.get_sample_value("flexops_pages_free") == engine.pool.num_pages
    assert registry.get_sample_value("flexops_cache_lookups_total") == 2
    assert registry.get_sample_value("flexops_cache_hit_rate") == 0
    serve(engine, [Asked((7,) * 30, SamplingParams(max_new_tokens=1))] * 2)
    assert registry.get_sample_value("flexops_cached_tokens_total") == 29
    assert b"flexops_tpot_us_mean" in prometheus_client.generate_latest(registry)
