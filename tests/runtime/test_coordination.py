"""The cost model against Table 1, and the rule that shares out the SMs."""

import pytest
import torch

from flexops import FlexHybridConfig
from flexops.kernels import ATTENTION, SSM
from flexops.runtime.coordination import (
    BranchCost,
    BranchPlan,
    CostModel,
    DeviceSpeed,
    feasible_splits,
    nearest_split,
    plan_branches,
    target_share,
    time_on_share,
)
from flexops.runtime.profiling import PART_NAMES, BranchLoad, BranchProfile, terms

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


def test_a_batch_costs_what_its_parts_do_but_reads_weights_once():
    load = BranchLoad.of(decodes=[99, 399], prefills=[(10, 20)])
    parts = [(1, 99), (1, 399), (10, 20)]
    for route in (ATTENTION, SSM):
        apart = sum(COMPUTE_BOUND.predict_us(route, *part) for part in parts)
        assert COMPUTE_BOUND.predict_load_us(route, load) == pytest.approx(apart)
        weights = (512 * 64 * 20 if route == ATTENTION else 512 * (2 * 1024 + 1280 + 16)) * 4
        apart = sum(MEMORY_BOUND.predict_us(route, *part) for part in parts)
        assert MEMORY_BOUND.predict_load_us(route, load) == pytest.approx(apart - 2 * weights)


def test_a_profile_takes_the_place_of_the_analytic_model():
    sizes = {part: len(terms(part, BranchLoad.of([1]), CONFIG)) for part in PART_NAMES}
    profile = BranchProfile({}, {"attention": [3.0] + [0.0] * (sizes[ATTENTION] - 1)}, {})
    cost = CostModel(CONFIG, torch.float32, COMPUTE_BOUND.speed, profile)
    assert cost.predict_us(ATTENTION, 1, 500) == cost.predict_us(ATTENTION, 64, 0) == 3.0
    assert cost.predict_us(ATTENTION, 0, 500) == 0.0
    assert cost.predict_us(SSM, 64, 0) == COMPUTE_BOUND.predict_us(SSM, 64, 0), "the profile has no SSM branch"
    profile = BranchProfile({}, {"ssm": [0.0] * 8 + [7.0, 5.0] + [0.0] * (sizes[SSM] - 10)}, {})
    cost = CostModel(CONFIG, torch.float32, COMPUTE_BOUND.speed, profile)
    assert (cost.predict_us(SSM, 1, 500), cost.predict_us(SSM, 2, 500)) == (7.0, 5.0), "one token is a decode"


def test_the_rest_of_a_layer_comes_from_the_same_profile():
    weights = 3 * 512 * 1536
    assert COMPUTE_BOUND.rest_us(0, 10) == 2 * weights * 10
    profile = BranchProfile({}, {"ffn": [4.0, 0.0, 1e6 / weights] + [0.0] * 5}, {})
    cost = CostModel(CONFIG, torch.float32, COMPUTE_BOUND.speed, profile)
    assert cost.rest_us(0, 1) == pytest.approx(5.0) and cost.rest_us(0, 256) == pytest.approx(6.0)
    assert cost.rest_us(0, 0) == 0.0
    without = FlexHybridConfig(layers_without_ffn=[1])
    assert CostModel(without, torch.float32, COMPUTE_BOUND.speed, profile).rest_us(1, 256) == 0.0


def test_the_core_of_a_branch_is_what_its_projections_leave():
    load = BranchLoad.of(prefills=[(100, 0)])
    core, whole = COMPUTE_BOUND.core_cost(ATTENTION, load), COMPUTE_BOUND.predict_load_us(ATTENTION, load)
    assert core.us == pytest.approx(4 * 512 * 5050) and core.compute_share == pytest.approx(1.0)
    assert whole - core.us == pytest.approx(2 * 512 * 64 * 20 * 100)
    decode = BranchLoad.of(decodes=[9] * 4)
    core = MEMORY_BOUND.core_cost(SSM, decode)
    assert core.us == pytest.approx(4 * 2 * (4 * 1024 * 128 + 1280 * 4 * 4)) and core.compute_share < 1e-9
    assert COMPUTE_BOUND.core_cost(SSM, BranchLoad.of()) == BranchCost(0.0, 0.0)


# --- the allocation rule --------------------------------------------------------------------------------------

SPLITS = feasible_splits(132)
BOUND = (0.0, 0.25, 0.5, 0.75, 1.0)


def test_splits_of_an_h100():
    assert SPLITS == [(16, 112), (32, 96), (48, 80), (64, 64), (80, 48), (96, 32), (112, 16)]
    assert feasible_splits(148)[-1] == (128, 16) and len(feasible_splits(148)) == 8
    assert feasible_splits(31) == [] and feasible_splits(32) == [(16, 16)]
    assert feasible_splits(100, 40) == [(40, 40)]
    for bad in ((0, 16), (132, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            feasible_splits(*bad)


def test_memory_bound_work_slows_down_as_measured():
    memory, compute = BranchCost(100.0, 0.0), BranchCost(100.0, 1.0)
    for sms, slower in ((132, 1.0), (96, 1.06), (64, 1.09), (32, 1.33), (16, 2.66), (80, 1.075)):
        assert time_on_share(memory, sms / 132) == pytest.approx(100 * slower)
        assert time_on_share(compute, sms / 132) == pytest.approx(100 * 132 / sms)
        assert time_on_share(BranchCost(100.0, 0.5), sms / 132) == pytest.approx(50 * (slower + 132 / sms))


@pytest.mark.parametrize("attention_bound", BOUND)
@pytest.mark.parametrize("ssm_bound", BOUND)
def test_at_the_target_both_branches_end_together(attention_bound, ssm_bound):
    for attention_us in (1.0, 30.0, 200.0, 1000.0):
        attention, ssm = BranchCost(attention_us, attention_bound), BranchCost(100.0, ssm_bound)
        share = target_share(attention, ssm)
        assert 0 < share < 1
        assert time_on_share(attention, share) == pytest.approx(time_on_share(ssm, 1 - share), rel=1e-2)
        if attention_bound == ssm_bound == 1.0:
            assert share == pytest.approx(attention_us / (attention_us + 100), abs=1e-4)


def test_a_heavier_branch_never_gets_fewer_sms():
    for bounds in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.3, 0.6)):
        chosen = [
            nearest_split(target_share(BranchCost(us, bounds[0]), BranchCost(100.0, bounds[1])), SPLITS)
            for us in (0.5, 5, 20, 50, 100, 200, 500, 2000, 20000)
        ]
        assert chosen == sorted(chosen) and chosen[-1] == 6


@pytest.mark.parametrize(
    ("share", "sms"), [(0.0, 16), (0.18, 16), (0.19, 32), (0.4, 48), (0.5, 64), (0.4375, 64), (0.84, 112), (1.0, 112)]
)
def test_nearest_feasible_split(share, sms):
    """The pool is 128: 0.19 of it is 24.3 SMs; 0.4375 is 56, as near to 48 as to 64."""
    assert SPLITS[nearest_split(share, SPLITS)][0] == sms


@pytest.mark.parametrize("attention_bound", BOUND)
@pytest.mark.parametrize("ssm_bound", BOUND)
def test_a_partition_only_where_the_gain_beats_fork_and_join(attention_bound, ssm_bound):
    for us in (5.0, 50.0, 500.0):
        for fork_join_us in (0.0, 20.0, 1e6):
            attention, ssm = BranchCost(us, attention_bound), BranchCost(60.0, ssm_bound)
            plan = plan_branches(attention, ssm, SPLITS, 132, fork_join_us)
            assert plan.predicted_us <= us + 60.0
            if plan.mode == "partition":
                a, s = SPLITS[plan.split]
                ends = time_on_share(attention, a / 132), time_on_share(ssm, s / 132)
                assert plan.predicted_us == pytest.approx(max(ends) + fork_join_us)
                assert plan.predicted_us < us + 60.0
            else:
                assert plan == BranchPlan("serial", None, us + 60.0)


def test_what_is_partitioned():
    """Two sides that arithmetic bounds gain nothing; arithmetic beside memory traffic does, if it is long enough."""
    compute, memory = BranchCost(100.0, 1.0), BranchCost(100.0, 0.0)
    assert plan_branches(compute, compute, SPLITS, 132, 0.0).mode == "serial"
    plan = plan_branches(compute, memory, SPLITS, 132, 10.0)
    assert plan.mode == "partition" and SPLITS[plan.split] == (96, 32)
    assert plan.predicted_us == pytest.approx(100 * 132 / 96 + 10)
    assert plan_branches(memory, compute, SPLITS, 132, 10.0).split == 1
    assert plan_branches(compute, memory, SPLITS, 132, 100.0).mode == "serial"


def test_a_branch_alone_takes_the_whole_device():
    some, none = BranchCost(100.0, 0.5), BranchCost(0.0, 0.0)
    assert plan_branches(some, none, SPLITS, 132, 0.0) == BranchPlan("serial", None, 100.0)
    assert plan_branches(none, some, SPLITS, 132, 0.0) == BranchPlan("serial", None, 100.0)
    assert (target_share(some, none), target_share(none, some), target_share(none, none)) == (1.0, 0.0, 0.0)


def test_without_partitions_streams_must_beat_fork_and_join_too():
    long, short = BranchCost(100.0, 1.0), BranchCost(15.0, 0.0)
    assert plan_branches(long, short, [], 132, 10.0) == BranchPlan("streams", None, 110.0)
    assert plan_branches(long, short, [], 132, 20.0) == BranchPlan("serial", None, 115.0)
