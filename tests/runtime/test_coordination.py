"""The analytic cost model against Table 1."""

import pytest
import torch

from flexops import FlexHybridConfig
from flexops.kernels import ATTENTION, SSM
from flexops.runtime.coordination import CostModel, DeviceSpeed

CONFIG = FlexHybridConfig(
    hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, mamba_n_heads=16, mamba_d_state=128
)
COMPUTE_BOUND = CostModel(CONFIG, torch.float32, DeviceSpeed(flops_per_us=1.0, bytes_per_us=1e12))
MEMORY_BOUND = CostModel(CONFIG, torch.float32, DeviceSpeed(flops_per_us=1e12, bytes_per_us=1.0))


def test_attention_prefill_is_linear_plus_quadratic():
    # projections 2 * 512 * 64 * 20 per token, scores and values 4 * 8 * 64 per pair of query and key
    for tokens in (1, 10, 1000):
        expected = 2 * 512 * 64 * 20 * tokens + 4 * 512 * tokens * (tokens + 1) / 2
        assert COMPUTE_BOUND.predict_us(ATTENTION, tokens, 0) == pytest.approx(expected)


def test_attention_decode_grows_with_its_context_and_ssm_does_not():
    cost = COMPUTE_BOUND.predict_us
    assert cost(ATTENTION, 1, 4000) - cost(ATTENTION, 1, 2000) == pytest.approx(4 * 512 * 2000)
    assert cost(SSM, 1, 4000) == cost(SSM, 1, 0)
    assert cost(SSM, 64, 0) == pytest.approx(64 * cost(SSM, 1, 0))


def test_a_prefix_and_its_suffix_cost_what_the_whole_does():
    cost = COMPUTE_BOUND.predict_us
    whole = cost(ATTENTION, 300, 0)
    assert cost(ATTENTION, 120, 0) + cost(ATTENTION, 180, 120) == pytest.approx(whole)


def test_memory_bound_decode_reads_weights_and_kv_or_state():
    weights, kv_token = 512 * 64 * 20 * 4, 2 * 2 * 64 * 4
    assert MEMORY_BOUND.predict_us(ATTENTION, 1, 99) == pytest.approx(weights + 100 * kv_token + 2 * 512 * 4)
    ssm_weights = 512 * (2 * 1024 + 1280 + 16) * 4
    state = 2 * (4 * 1024 * 128 + 1280 * 4 * 4)
    assert MEMORY_BOUND.predict_us(SSM, 1, 99) == pytest.approx(ssm_weights + state + 2 * 512 * 4)


def test_nothing_costs_nothing_and_negative_numbers_are_refused():
    assert COMPUTE_BOUND.predict_us(SSM, 0, 10) == 0.0
    with pytest.raises(ValueError, match="tokens=-1"):
        COMPUTE_BOUND.predict_us(ATTENTION, -1, 0)


def test_the_speed_of_this_device_is_plausible():
    speed = DeviceSpeed.measure("cpu", torch.float32)
    assert 1e2 < speed.flops_per_us < 1e9 and 1e2 < speed.bytes_per_us < 1e8
