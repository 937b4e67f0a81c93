"""Branches at once on a device: disjoint SMs, the same tokens, and time. Skipped where there is no GPU."""

import statistics
from functools import partial

import pytest
import torch

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.models.packed import PackedModel
from flexops.runtime import Engine
from flexops.runtime.branches import fork_join, make_coordinator
from flexops.runtime.measuring import BranchRunner, measure, profile_model, time_us
from flexops.runtime.partition import PartitionUnavailable, SMPartitions
from flexops.runtime.profiling import BranchLoad
from tests.runtime.serving import random_requests, serve

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402  after the skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda", 0)


@triton.jit
def sm_kernel(out):
    """Writes the SM that each program runs on."""
    lane = tl.zeros([1], tl.int32)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [lane], tl.int32, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), sm)


@pytest.fixture(scope="module")
def partitions():
    torch.cuda.init()
    try:
        made = SMPartitions(0)
    except PartitionUnavailable as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = FlexHybridConfig(
        vocab_size=128,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        max_position_embeddings=8192,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    return FlexHybridModel(config).to(CUDA, torch.bfloat16).eval()


def test_granted_sms_fit_the_device(partitions):
    sms = torch.cuda.get_device_properties(CUDA).multi_processor_count
    assert partitions.num_sms == sms and len(partitions.splits) >= 1
    assert all(min(a, b) >= 16 and a + b <= sms for a, b in partitions.splits)


def test_partitions_run_on_disjoint_sms(partitions):
    def where(out: torch.Tensor) -> torch.Tensor:
        sm_kernel[(len(out),)](out, num_warps=1)
        return out

    for (attention_sms, ssm_sms), handles in zip(partitions.splits, partitions.streams, strict=True):
        streams = tuple(torch.cuda.ExternalStream(handle, device=CUDA) for handle in handles)
        outs = [torch.full((4096,), -1, dtype=torch.int32, device=CUDA) for _ in range(2)]
        fork_join(streams, partial(where, outs[0]), partial(where, outs[1]))
        torch.cuda.synchronize()
        first, second = (set(out.tolist()) for out in outs)
        assert -1 not in first | second and not first & second
        assert len(first) <= attention_sms and len(second) <= ssm_sms
        assert len(first) >= attention_sms // 2 and len(second) >= ssm_sms // 2


@pytest.mark.parametrize("coordination", [True, "streams"])
def test_coordination_changes_no_bit(model, coordination):
    asked = random_requests(model, 24, longest=300, seed=1)
    config = {"memory_bytes": 1 << 28}
    expected = serve(Engine(model, EngineConfig(coordination=False, **config)), asked)
    engine = Engine(model, EngineConfig(coordination=coordination, **config))
    assert engine.executor.coordinator is not None
    for ours, theirs in zip(serve(engine, asked), expected, strict=True):
        assert ours.same_bits(theirs)


def test_what_forks_is_no_slower_than_in_turn(model):
    """Where the rule chooses to fork, in the median of interleaved runs; it may choose never to."""
    with torch.no_grad():
        packed = PackedModel(model, 8192)
    coordinator = make_coordinator(True, model.config, torch.bfloat16, CUDA)
    loads = BranchLoad.of(prefills=[(2000, 4000)]), BranchLoad.of(decodes=[1000] * 200)
    plan = coordinator.plan(*loads)
    if plan.mode == "serial":
        pytest.skip(f"predicted to take {plan.predicted_us:.0f} us in turn, less than at once")
    runner = BranchRunner(packed, list(loads))
    a, s = runner.prepare(0, loads[0]), runner.prepare(1, loads[1])
    ratios = []
    with torch.inference_mode():
        for _ in range(20):
            together, _ = time_us(lambda: fork_join(coordinator.streams[plan.split or 0], a, s), CUDA)
            ratios.append(together / time_us(lambda: (a(), s()), CUDA)[0])
    assert statistics.median(ratios) < 1.05


def test_the_cost_model_predicts_this_device(model):
    with torch.no_grad():
        packed = PackedModel(model, 8192)
    profile = profile_model(packed, max_context=4096, budget_s=20)
    for name in ("attention", "ssm"):
        assert profile.held_out[name].median < 0.10
    assert len(measure(packed, [BranchLoad.of([5])], 3, 0.0)) == 3
