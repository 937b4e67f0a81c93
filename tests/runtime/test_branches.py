"""Two branches at once: the bits of one after the other, the order of events, and what falls back to what.

Streams are stand-ins that record what is asked of them: wiring tests. tests/gpu runs the real ones.
"""

import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexops import EngineConfig
from flexops.kernels import cpu
from flexops.kernels.linear import PackedLinear
from flexops.models.packed import PackedAttention, PackedMamba2, PackedModel
from flexops.runtime import branches
from flexops.runtime.branches import BranchCoordinator, fork_join, make_coordinator
from flexops.runtime.coordination import BranchPlan, CostModel, DeviceSpeed, feasible_splits
from flexops.runtime.measuring import BranchRunner
from flexops.runtime.partition import PartitionUnavailable
from flexops.runtime.profiling import BranchLoad, BranchProfile
from tests import tiny
from tests.kernels.helpers import launch_grids, triton_module
from tests.runtime.serving import random_requests, serve, small_engine

CUDA = torch.device("cuda", 0)


class FakeStream:
    """Writes down what a stream is asked to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cpu")
        self.events = 0

    def record_event(self) -> str:
        self.events += 1
        event = f"{self.name}.{self.events}"
        self.log.append(f"{self.name} records {event}")
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch):
    """The log of a main stream and of any FakeStream made with it; entering a stream is logged too."""
    entries: list[str] = []
    main = FakeStream("main", entries)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)

    class Entered:
        def __init__(self, stream: FakeStream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            entries.append(f"enter {self.stream.name}")

        def __exit__(self, *_: object) -> None:
            entries.append(f"leave {self.stream.name}")

    monkeypatch.setattr(torch.cuda, "stream", Entered)
    return entries


def test_fork_and_join_by_events(log):
    def branch(name: str):
        return lambda: log.append(f"{name} runs") or torch.tensor(len(name))

    results = fork_join((FakeStream("a", log), FakeStream("b", log)), branch("first"), branch("second"))
    assert [int(r) for r in results] == [5, 6]
    assert log == [
        "main records main.1",
        "a waits for main.1",
        "enter a",
        "first runs",
        "leave a",
        "b waits for main.1",
        "enter b",
        "second runs",
        "leave b",
        "a records a.1",
        "main waits for a.1",
        "b records b.1",
        "main waits for b.1",
    ]


@pytest.mark.parametrize("failing", ["first", "second"])
def test_the_join_is_made_where_a_branch_raises(log, failing):
    """Its memory goes back to the main stream, which must not write it while a side stream still reads."""

    def branch(name: str):
        def run() -> torch.Tensor:
            log.append(f"{name} runs")
            if name == failing:
                raise RuntimeError(name)
            return torch.tensor(0)

        return run

    with pytest.raises(RuntimeError, match=failing):
        fork_join((FakeStream("a", log), FakeStream("b", log)), branch("first"), branch("second"))
    joined = [entry for entry in log if entry.startswith("main waits")]
    assert joined == ["main waits for a.1", "main waits for b.1"][: 1 + (failing == "second")]
    assert log[-1] == joined[-1]


def test_products_stay_on_the_main_stream_and_what_the_branches_read_lives_until_the_join(model, log, monkeypatch):
    where, read, alive = [], [], []
    product, append, project = PackedLinear.__call__, PackedAttention.append, PackedMamba2.project

    def noted(method, results):
        def call(self, *args):
            out = method(self, *args)
            results.extend(weakref.ref(t) for t in (out if isinstance(out, tuple) else (out,)))
            return out

        return call

    def multiply(self: PackedLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sides = [entry.split()[0] for entry in log if entry.startswith(("enter", "leave"))]
        where.append(sides[-1] if sides else "before")
        return product(self, x, out)

    def wait_event(self: FakeStream, event: str) -> None:
        if self.name == "main":
            alive.append([tensor() is not None for tensor in read])

    monkeypatch.setattr(PackedLinear, "__call__", multiply)
    monkeypatch.setattr(PackedAttention, "append", noted(append, read))
    monkeypatch.setattr(PackedMamba2, "project", noted(project, read))
    monkeypatch.setattr(FakeStream, "wait_event", wait_event)
    run_both(model, LOADS["both"], coordinator(model, log, False, feasible_splits(132)))
    assert where == ["before", "before", "leave", "leave"], "two products before the fork, two after the join"
    assert alive == [[True] * 4, [True] * 4], "q, z, xBC and dt, at either join"


LOADS = {
    "decodes": (BranchLoad.of(decodes=[3, 40]), BranchLoad.of(decodes=[0, 5, 17])),
    "prefills": (BranchLoad.of(prefills=[(9, 0)]), BranchLoad.of(prefills=[(4, 3), (20, 0)])),
    "both": (BranchLoad.of([3], [(9, 10)]), BranchLoad.of([8], [(5, 0)])),
}


def run_both(model: PackedModel, loads: tuple[BranchLoad, BranchLoad], coordinator: BranchCoordinator | None, ops=cpu):
    """The branches of layer 0 on two disjoint sets of pages of one pool, and the pool's bytes afterwards."""
    attention, ssm = loads
    runner = BranchRunner(model, [attention, ssm])
    runner.pool.memory.copy_(
        torch.randn(runner.pool.memory.numel() // 4, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
        .view_as(runner.pool.memory)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(attention.tokens + ssm.tokens, model.config.hidden_size, generator=generator)
    a, s, n = runner._attention_batch(attention), runner._ssm_batch(ssm), attention.tokens
    layer, pool = model.layers[0], runner.pool
    with torch.inference_mode():
        if coordinator is None:
            y = layer.attention(u[:n], a, model.cos_sin, pool.kv_cache, ops)
            return y, layer.ssm(u[n:], s, pool.state_cache, pool.conv_cache, ops), pool.memory
        args = (layer.attention, layer.ssm, u, a, s, attention, ssm, model.cos_sin, pool, ops)
        return *coordinator.run(*args), pool.memory


@pytest.fixture(scope="module")
def model():
    with torch.no_grad():
        return PackedModel(tiny.make_model(), 512)


def coordinator(model: PackedModel, log: list[str], fused: bool, splits, fork_join_us: float = 0.0):
    names = [f"{a}/{b}" for a, b in splits] or ["plain"]
    streams = [(FakeStream(f"{name} a", log), FakeStream(f"{name} b", log)) for name in names]
    # arithmetic costs nothing: both branches are bound by memory traffic, and gain from running together
    cost = CostModel(model.config, torch.float32, DeviceSpeed(flops_per_us=1e12, bytes_per_us=1e3))
    return BranchCoordinator(cost, fused, splits, streams, 132, fork_join_us)


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize("splits", [[], feasible_splits(132)], ids=["streams", "partition"])
@pytest.mark.parametrize("fused", [False, True])
def test_same_bits_as_one_branch_after_the_other(model, log, loads, splits, fused):
    expected = run_both(model, loads, None)
    got = run_both(model, loads, coordinator(model, log, fused, splits))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    if fused and loads is LOADS["decodes"]:
        assert log == [], "one launch on the main stream"
    else:
        entered = [entry.removeprefix("enter ") for entry in log if entry.startswith("enter")]
        assert [name[-1] for name in entered] == ["a", "b"] and entered[0][:-2] == entered[1][:-2]
        assert entered[0].startswith("plain") == (not splits)


class _Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made with memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = [x for x in (made if isinstance(made, tuple | list) else (made,)) if isinstance(x, torch.Tensor)]
        self.sizes += [list(x.shape) for x in found if x.numel() and x.untyped_storage().data_ptr() not in given]
        return made


@pytest.mark.parametrize("form", ["cpu", "triton"])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS.keys())
def test_results_are_made_before_the_fork(model, log, monkeypatch, loads, form):
    """A wiring test: what the branches make between fork and join. The Triton kernels are not run."""
    ops = cpu
    if form == "triton":
        ops = triton_module("triton_backend")
        for name in ("attention", "causal_conv1d", "decode_branches", "kv_cache", "norm", "ssd_scan", "state_update"):
            launch_grids(monkeypatch, triton_module(name))
    made, fork = _Made(), branches.fork_join

    def watched(*args):
        with made:
            return fork(*args)

    monkeypatch.setattr(branches, "fork_join", watched)
    run_both(model, loads, coordinator(model, log, False, feasible_splits(132)), ops)
    assert [entry for entry in log if entry.startswith("enter")]
    if form == "triton" and loads is not LOADS["decodes"]:
        steps, states, chunks = made.sizes  # of the scan: between its two launches, on its own stream
        assert steps[0] == 4 and len(states) == 4 and chunks[1] == 3
    else:
        assert made.sizes == []


def test_where_fork_and_join_cost_more_than_they_save_nothing_forks(model, log):
    made = coordinator(model, log, False, feasible_splits(132), fork_join_us=1e9)
    expected = run_both(model, LOADS["both"], None)
    for ours, theirs in zip(run_both(model, LOADS["both"], made), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert log == []
    assert made.plan(*LOADS["both"]).mode == "serial"


def test_the_streams_of_the_split_that_was_planned(model, log, monkeypatch):
    splits = feasible_splits(132)
    made = coordinator(model, log, False, splits)
    monkeypatch.setattr(made, "plan", lambda *_: BranchPlan("partition", 5, 1.0))
    run_both(model, LOADS["both"], made)
    assert [entry for entry in log if entry.startswith("enter")] == ["enter 96/32 a", "enter 96/32 b"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("splits", [[], feasible_splits(132)], ids=["streams", "partition"])
def test_an_engine_with_a_coordinator_gives_the_same_bits(log, splits, fused):
    model = tiny.make_model()
    asked = random_requests(model, 12, seed=5)
    expected = serve(small_engine(model), asked)
    engine = small_engine(model)
    assert engine.executor.coordinator is None, "a CPU has nothing to coordinate"
    engine.executor.coordinator = coordinator(engine.executor.model, log, fused, splits)
    for ours, theirs in zip(serve(engine, asked), expected, strict=True):
        assert ours.same_bits(theirs)
    forks = sum(entry.startswith("main records") for entry in log)
    assert forks > (1 if fused else 10)


def test_coordination_is_checked():
    for setting in (True, False, "streams"):
        assert EngineConfig(coordination=setting).coordination == setting
    with pytest.raises(ValueError, match="coordination='greencontext' must be True, False or 'streams'"):
        EngineConfig(coordination="greencontext")


# --- what falls back to what ----------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch, log):
    """A torch.cuda whose streams are recorded ones, and a driver that grants two splits."""
    partitions = SimpleNamespace(splits=[(16, 112), (64, 64)], streams=[(11, 12), (21, 22)], num_sms=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("plain", log))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: FakeStream(str(handle), log))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(branches, "SMPartitions", lambda index: partitions)
    monkeypatch.setattr(branches.DeviceSpeed, "measure", lambda *_: DeviceSpeed(1.0, 1.0))
    return partitions


def make(coordination: bool | str, device: torch.device = CUDA, **profile: object) -> BranchCoordinator | None:
    return make_coordinator(coordination, tiny.make_model().config, torch.float32, device, **profile)


def test_partitions_where_the_driver_grants_them(cuda, caplog):
    made = make(True)
    assert made.fused and made.splits == [(16, 112), (64, 64)] and made.partitions is cuda
    assert [[stream.name for stream in pair] for pair in made.streams] == [["11", "12"], ["21", "22"]]
    assert made.num_sms == 132 and made.fork_join_us > 0 and caplog.text == ""


def test_the_profile_predicts_what_is_coordinated(cuda):
    profile = BranchProfile({}, {}, {})
    assert make(True, profile=profile).cost.profile is profile and make(True).cost.profile is None


def test_plain_streams_where_it_does_not(cuda, caplog, monkeypatch):
    def refuse(index: int) -> None:
        raise PartitionUnavailable("cuInit cannot be called: no driver")

    monkeypatch.setattr(branches, "SMPartitions", refuse)
    with caplog.at_level(logging.WARNING):
        made = make(True)
    assert made.fused and made.splits == [] and [s.name for s in made.streams[0]] == ["plain", "plain"]
    assert [r.getMessage() for r in caplog.records] == [
        "branches run on plain streams: cuInit cannot be called: no driver"
    ]


def test_one_after_the_other_where_there_are_no_streams(cuda, caplog, monkeypatch):
    def refuse(device: torch.device) -> None:
        raise RuntimeError("out of streams")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    with caplog.at_level(logging.WARNING):
        assert make(True) is None
    assert [r.getMessage() for r in caplog.records] == [
        "branches run one after the other: no CUDA streams (out of streams)"
    ]


def test_plain_streams_on_demand_make_no_partitions_and_no_fused_launch(cuda, monkeypatch):
    monkeypatch.setattr(branches, "SMPartitions", None)
    made = make("streams")
    assert not made.fused and made.splits == [] and made.partitions is None


def test_nothing_to_coordinate_when_off_or_on_a_cpu(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", None)
    assert make(False) is None
    assert make(True, torch.device("cpu")) is None and make("streams", torch.device("cpu")) is None


def test_fork_and_join_are_timed_with_as_many_events_as_they_take(log):
    streams = FakeStream("a", log), FakeStream("b", log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        assert branches._fork_join_us(streams, repeats=4) > 0
    assert sum(entry.startswith("main waits") for entry in log) == 2 * 5
