"""What a branch costs by Table 1, and which SMs it gets for it (§5.2). The cost model also chooses between caches."""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..config import FlexHybridConfig
from ..kernels import ATTENTION
from .profiling import FFN, PART_NAMES, BranchLoad, BranchProfile


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does per microsecond: multiply-adds counted as two FLOPs, and bytes moved."""

    flops_per_us: float
    bytes_per_us: float

    @classmethod
    def nominal(cls) -> "DeviceSpeed":
        """Ten FLOPs a byte: good enough where costs are only compared with each other."""
        return cls(flops_per_us=1e5, bytes_per_us=1e4)

    @classmethod
    def measure(cls, device: torch.device | str, dtype: torch.dtype) -> "DeviceSpeed":
        """A matrix product and a copy on the device, best of a few: a tenth of a second on a CPU.

        On a GPU they are large enough to hide a launch, and to be beyond its cache.
        """
        size, num_bytes = (4096, 1 << 27) if torch.device(device).type == "cuda" else (512, 1 << 24)
        a = torch.randn(size, size, device=device, dtype=dtype)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        product_us = _best_us(lambda: a @ a, a.device)
        copy_us = _best_us(lambda: target.copy_(source), a.device)
        return cls(flops_per_us=2 * size**3 / product_us, bytes_per_us=2 * num_bytes / copy_us)


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic: FLOPs, two per multiply-add, and bytes."""

    flops: float
    moved_bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    def us(self, speed: DeviceSpeed) -> float:
        """The longer of arithmetic and traffic, in microseconds."""
        return max(self.flops / speed.flops_per_us, self.moved_bytes / speed.bytes_per_us)


@dataclass(frozen=True)
class BranchCost:
    """What may run beside the other branch: all of a branch but its projections.

    us: microseconds on the whole device.  compute_share: from 0 to 1, the part of it that arithmetic bounds and not
    memory traffic.
    """

    us: float
    compute_share: float


@dataclass(frozen=True)
class CostModel:
    """Predicts the time of a layer's parts from Table 1: fitted to a profile, or else from the speed of the device.

    Without a profile a part takes the longer of its arithmetic and its memory traffic: its weights once, and per token
    the KV it reads (attention) or per request the state it reads and writes (SSM). A profile has all parts that the
    model has, so that what is compared was measured in the same way.
    """

    config: FlexHybridConfig
    dtype: torch.dtype
    speed: DeviceSpeed
    profile: BranchProfile | None = None

    def predict_us(self, route: int, tokens: int, context: int) -> float:
        """Microseconds of one layer's branch for `tokens` new tokens of a request behind `context` cached ones.

        Prefill is tokens > 1 (context 0 without a cached prefix), a decode is tokens = 1. Raises ValueError for
        negative numbers.
        """
        if tokens < 0 or context < 0:
            raise ValueError(f"tokens={tokens} and context={context} must not be negative")
        if not tokens:
            return 0.0
        decodes, prefills = ([context], []) if tokens == 1 else ([], [(tokens, context)])
        return self.predict_load_us(route, BranchLoad.of(decodes, prefills))

    def predict_load_us(self, route: int, load: BranchLoad) -> float:
        """Microseconds of one layer's branch for a batch; 0 for an empty one."""
        if not load.tokens:
            return 0.0
        if (measured_us := self._measured_us(route, load)) is not None:
            return measured_us
        return (self._projections(route, load) + self._core(route, load)).us(self.speed)

    def rest_us(self, layer_idx: int, tokens: int) -> float:
        """Microseconds of what a layer does besides its branch: the feed-forward network, where it has one."""
        if not tokens or not self.config.has_ffn(layer_idx):
            return 0.0
        if (measured_us := self._measured_us(FFN, BranchLoad.of(prefills=[(tokens, 0)]))) is not None:
            return measured_us
        weights = 3 * self.config.hidden_size * self.config.intermediate_size
        moved_bytes = (weights + 2 * tokens * self.config.hidden_size) * self.dtype.itemsize
        return Work(2 * weights * tokens, moved_bytes).us(self.speed)

    def _measured_us(self, part: int, load: BranchLoad) -> float | None:
        """From the profile; None without one, and for a part that no layer of the model has."""
        if self.profile is None or PART_NAMES[part] not in self.profile.coefficients:
            return None
        return self.profile.predict_us(part, load, self.config)

    def core_cost(self, route: int, load: BranchLoad) -> BranchCost:
        """The branch without its projections, which stay on the main stream: the part of its time that Table 1 gives
        to the rest."""
        if not load.tokens:
            return BranchCost(0.0, 0.0)
        core = self._core(route, load)
        core_us, projections_us = core.us(self.speed), self._projections(route, load).us(self.speed)
        us = self.predict_load_us(route, load) * core_us / (core_us + projections_us)
        compute_us, memory_us = core.flops / self.speed.flops_per_us, core.moved_bytes / self.speed.bytes_per_us
        return BranchCost(us, compute_us / (compute_us + memory_us))

    def _projections(self, route: int, load: BranchLoad) -> Work:
        """O(L d^2)."""
        config, size = self.config, self.dtype.itemsize
        if route == ATTENTION:
            heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
            weights = config.hidden_size * config.head_dim * heads
        else:
            weights = config.hidden_size * (2 * config.d_inner + config.conv_dim + config.mamba_n_heads)
        return Work(2 * weights * load.tokens, (weights + 2 * load.tokens * config.hidden_size) * size)

    def _core(self, route: int, load: BranchLoad) -> Work:
        """O(L^2 d) in attention's prefill and O(r d) in its decode; O(L d_s) and O(d_s) in the SSM's."""
        config, size = self.config, self.dtype.itemsize
        if route == ATTENTION:
            pairs = load.prefill_pairs + load.decode_keys
            kv_bytes = 2 * config.num_key_value_heads * config.head_dim * size
            flops = 4 * config.num_attention_heads * config.head_dim * pairs
            return Work(flops, kv_bytes * (load.prefill_keys + load.decode_keys))
        state = config.d_inner * config.mamba_d_state
        window_bytes = config.conv_dim * config.mamba_d_conv * size
        flops = (2 * config.conv_dim * config.mamba_d_conv + 6 * state) * load.tokens
        return Work(flops, 2 * (4 * state + window_bytes) * len(load.counts))


# --- which SMs a branch gets ----------------------------------------------------------------------------------

GRANULARITY = 16  # SMs, §7: a partition has a multiple of them
# how much longer memory-bound work takes on a share of the SMs, measured for decode steps on an H200 (32, 64 and 96 of
# 132 SMs); on fewer, traffic falls with their number
MEMORY_SHARES = (32 / 132, 64 / 132, 96 / 132, 1.0)
MEMORY_SLOWDOWN = (1.33, 1.09, 1.06, 1.0)


@dataclass(frozen=True)
class BranchPlan:
    """How the two branches of a layer run.

    mode: "serial", "streams" (side by side on all SMs) or "partition".  split: the index of the partition, or None.
    predicted_us: for both, with fork and join.
    """

    mode: str
    split: int | None
    predicted_us: float


def feasible_splits(num_sms: int, granularity: int = GRANULARITY) -> list[tuple[int, int]]:
    """(attention SMs, SSM SMs) of every split of the pool, the largest multiple of the granularity in num_sms (§7).

    For 132 SMs and 16: a pool of 128 and (16, 112), (32, 96), ... (112, 16). Empty where the device is too small.
    Raises ValueError for numbers below 1.
    """
    if num_sms < 1 or granularity < 1:
        raise ValueError(f"num_sms={num_sms} and granularity={granularity} must be at least 1")
    groups = num_sms // granularity
    return [(k * granularity, (groups - k) * granularity) for k in range(1, groups)]


def time_on_share(cost: BranchCost, share: float) -> float:
    """Microseconds of a branch on this share of the SMs, above 0 and at most 1.

    Arithmetic slows down as SMs are taken away; memory traffic hardly does until few are left.
    """
    if share < MEMORY_SHARES[0]:
        memory = MEMORY_SLOWDOWN[0] * MEMORY_SHARES[0] / share
    else:
        i = min(bisect_right(MEMORY_SHARES, share), len(MEMORY_SHARES) - 1)
        (low, high), (slow, fast) = MEMORY_SHARES[i - 1 : i + 1], MEMORY_SLOWDOWN[i - 1 : i + 1]
        memory = slow + (fast - slow) * (share - low) / (high - low)
    return cost.us * (cost.compute_share / share + (1 - cost.compute_share) * memory)


def target_share(attention: BranchCost, ssm: BranchCost) -> float:
    """The share of the SMs at which attention ends when the SSM branch, on the rest, does (§5.2).

    1 or 0 where one of them has nothing to do. Two branches that arithmetic bounds get shares like their times.
    """
    if not attention.us or not ssm.us:
        return float(attention.us > 0)
    low, high = 0.0, 1.0
    for _ in range(16):  # far finer than a split; attention's time falls with its share, the other's rises
        middle = (low + high) / 2
        if time_on_share(attention, middle) > time_on_share(ssm, 1 - middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def nearest_split(share: float, splits: Sequence[tuple[int, int]]) -> int:
    """The index of the split whose share of attention's SMs is nearest; between two, the one with more of them."""
    return min(range(len(splits)), key=lambda i: (abs(splits[i][0] / sum(splits[i]) - share), -splits[i][0]))


def plan_branches(
    attention: BranchCost,
    ssm: BranchCost,
    splits: Sequence[tuple[int, int]],
    num_sms: int,
    fork_join_us: float,
) -> BranchPlan:
    """The allocation rule (§5.2): a partition only where the gain that is predicted beats fork and join.

    attention, ssm: what each branch would take on the whole device.  splits: (attention SMs, SSM SMs) of the partitions
    that were granted; none means two plain streams.  num_sms: of the device.  fork_join_us: what both cost.
    A branch alone takes the whole device. Plain streams can at best hide the shorter branch behind the longer.
    """
    serial_us = attention.us + ssm.us
    if not attention.us or not ssm.us:
        return BranchPlan("serial", None, serial_us)
    if splits:
        index = nearest_split(target_share(attention, ssm), splits)
        attention_sms, ssm_sms = splits[index]
        longer = max(time_on_share(attention, attention_sms / num_sms), time_on_share(ssm, ssm_sms / num_sms))
        plan = BranchPlan("partition", index, longer + fork_join_us)
    else:
        plan = BranchPlan("streams", None, max(attention.us, ssm.us) + fork_join_us)
    return plan if plan.predicted_us < serial_us else BranchPlan("serial", None, serial_us)


def _best_us(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The shortest of a few runs in microseconds, the device waited for."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begin) * 1e6)
    return best
