"""Both branches of a layer at once on a GPU (§5.2): one fused launch, partitioned SMs, plain streams, or in turn.

Projections are matrix products of the whole device's library and stay on the main stream; what runs side by side is
what lies between them. A fork is an event that both streams wait for, the join one event of each.
Memory: what the branches read and what they return is made on the main stream before the fork and held until after the
join, so a branch of decodes makes nothing. Of prefills, a scan on a GPU keeps steps and chunk states between its two
launches; those it makes on its own stream: freed, they go back to that stream and are written by it alone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..config import FlexHybridConfig
from ..kernels import ATTENTION, SSM
from ..models.packed import AttentionBatch, AttentionRoom, PackedAttention, PackedMamba2, SSMBatch, SSMRoom
from .coordination import BranchPlan, CostModel, DeviceSpeed, plan_branches
from .memory import PagePool
from .partition import PartitionUnavailable, SMPartitions
from .profiling import BranchLoad, BranchProfile

logger = logging.getLogger(__name__)

StreamPair = tuple[torch.cuda.Stream, torch.cuda.Stream]  # attention's and the SSM's


class BranchCoordinator:
    """Runs a layer's two branches together; both must have rows.

    cost: predicts them.  fused: decodes alone take one launch (`decode_branches`).  splits: (attention SMs, SSM SMs)
    of each partition, none where there are only plain streams.  streams: per split the streams (attention, SSM);
    without splits one pair.  num_sms: of the device.  fork_join_us: what a fork and a join cost.  partitions: what the
    streams live in, kept open as long as the coordinator.
    """

    def __init__(
        self,
        cost: CostModel,
        fused: bool,
        splits: Sequence[tuple[int, int]],
        streams: Sequence[StreamPair],
        num_sms: int,
        fork_join_us: float,
        partitions: SMPartitions | None = None,
    ) -> None:
        self.cost, self.fused = cost, fused
        self.splits, self.streams = splits, streams
        self.num_sms, self.fork_join_us = num_sms, fork_join_us
        self.partitions = partitions

    def plan(self, attention: BranchLoad, ssm: BranchLoad) -> BranchPlan:
        """How these loads run, by the allocation rule."""
        costs = self.cost.core_cost(ATTENTION, attention), self.cost.core_cost(SSM, ssm)
        return plan_branches(*costs, self.splits, self.num_sms, self.fork_join_us)

    def run(
        self,
        attention: PackedAttention,
        ssm: PackedMamba2,
        u: Tensor,
        attention_batch: AttentionBatch,
        ssm_batch: SSMBatch,
        attention_load: BranchLoad,
        ssm_load: BranchLoad,
        cos_sin: Tensor | None,
        pool: PagePool,
        ops: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        """u: [T, hidden_size] compact rows, those of attention first -> the outputs of both branches.

        The batches are those of the two branches, the loads count their work. The pool's caches are written. The
        results have the bits of one branch after the other.
        """
        n = attention_load.tokens
        kv_cache, state_cache, conv_cache = pool.kv_cache, pool.state_cache, pool.conv_cache
        q = attention.append(u[:n], attention_batch, cos_sin, kv_cache, ops)
        z, xBC, dt = ssm.project(u[n:])

        attention_room = attention.room(q, attention_batch, kv_cache, ops)
        ssm_room = ssm.room(z, xBC, dt, ssm_batch.num_decodes)

        def attend() -> Tensor:
            return attention.attend(q, attention_batch, kv_cache, ops, attention_room)

        def mix() -> Tensor:
            return ssm.mix(z, xBC, dt, ssm_batch, state_cache, conv_cache, ops, ssm_room)

        if self.fused and not attention_load.prefill_tokens and not ssm_load.prefill_tokens:
            batches, rooms = (attention_batch, ssm_batch), (attention_room, ssm_room)
            decode_both(attention, ssm, q, (z, xBC, dt), *batches, pool, ops, *rooms)
        else:
            plan = self.plan(attention_load, ssm_load)
            if plan.mode == "serial":
                attend()
                mix()
            else:
                fork_join(self.streams[plan.split or 0], attend, mix)
        return attention.out(attention_room.out.flatten(1)), ssm.out(ssm_room.mixed)


def decode_both(
    attention: PackedAttention,
    ssm: PackedMamba2,
    q: Tensor,
    projected: tuple[Tensor, Tensor, Tensor],
    attention_batch: AttentionBatch,
    ssm_batch: SSMBatch,
    pool: PagePool,
    ops: ModuleType,
    attention_room: AttentionRoom,
    ssm_room: SSMRoom,
) -> None:
    """The decodes of both branches in one launch, from q and the SSM's projected z, xBC and dt to the two rooms."""
    update = ssm.update_arguments(*projected, ssm_batch, pool.state_cache, pool.conv_cache)
    table, lens = attention_batch.page_table, attention_batch.context_lens
    results = (attention_room.out, *ssm_room.update), attention_room.workspace
    ops.decode_branches(q, pool.kv_cache, table, lens, attention.scale, *update, *results)
    ssm.finish_update(ssm_room, ops)


def fork_join(streams: StreamPair, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Both at once, each on its stream, between the current stream's work before and after.

    Where a branch raises, the current stream still waits for what was launched: its memory is free again then.
    """
    main = torch.cuda.current_stream(streams[0].device)
    fork = main.record_event()
    results = []
    started: list[torch.cuda.Stream] = []
    try:
        for stream, branch in zip(streams, (first, second), strict=True):
            stream.wait_event(fork)
            started.append(stream)
            with torch.cuda.stream(stream):
                results.append(branch())
    finally:
        for stream in started:
            main.wait_event(stream.record_event())
    return results[0], results[1]


def make_coordinator(
    coordination: bool | str,
    config: FlexHybridConfig,
    dtype: torch.dtype,
    device: torch.device,
    profile: BranchProfile | None = None,
) -> BranchCoordinator | None:
    """The coordinator for `EngineConfig.coordination`, or None: one branch after the other, as on every CPU.

    True prepares partitions and falls back to plain streams, and those to one branch after the other; the log says
    why. "streams" takes plain streams for decodes too, without the fused launch. False gives None.

    profile: of the model on the device, for the cost model; without one it is estimated from the device's speed.
    """
    if not coordination or device.type != "cuda":
        return None
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        streams: list[StreamPair] = [(torch.cuda.Stream(device), torch.cuda.Stream(device))]
        fork_join_us = _fork_join_us(streams[0])
    except RuntimeError as error:
        logger.warning("branches run one after the other: no CUDA streams (%s)", error)
        return None
    partitions = None
    if coordination != "streams":
        try:
            partitions = SMPartitions(torch.cuda.current_device() if device.index is None else device.index)
        except PartitionUnavailable as reason:
            logger.warning("branches run on plain streams: %s", reason)
    if partitions is not None:
        streams = [
            (torch.cuda.ExternalStream(attention, device=device), torch.cuda.ExternalStream(ssm, device=device))
            for attention, ssm in partitions.streams
        ]
    splits = [] if partitions is None else partitions.splits
    cost = CostModel(config, dtype, DeviceSpeed.measure(device, dtype), profile)
    return BranchCoordinator(cost, coordination != "streams", splits, streams, num_sms, fork_join_us, partitions)


def _fork_join_us(streams: StreamPair, repeats: int = 50) -> float:
    """Microseconds of a fork and a join of branches that do almost nothing."""
    nothing = torch.zeros(1, device=streams[0].device)

    def branch() -> Tensor:
        return nothing

    fork_join(streams, branch, branch)
    torch.cuda.synchronize(streams[0].device)
    begin = time.perf_counter()
    for _ in range(repeats):
        fork_join(streams, branch, branch)
    torch.cuda.synchronize(streams[0].device)
    return (time.perf_counter() - begin) * 1e6 / repeats
