"""Disjoint sets of SMs for the two branches, prepared once: green contexts through the CUDA driver (§5.2, §7).

The driver's calls are reached through `cuda.bindings`, which is imported when partitions are made. Anything that is
missing - the package, the driver, a device that can be split - is one PartitionUnavailable with the reason.
"""

import importlib
import weakref
from types import ModuleType
from typing import Any

from .coordination import GRANULARITY, feasible_splits


class PartitionUnavailable(Exception):
    """SMs cannot be partitioned here; the message says why."""


class SMPartitions:
    """Every feasible split of a device's SMs into two partitions, with a stream in each.

    splits: (attention SMs, SSM SMs) as granted, which may be more than was asked for.  streams: the driver's handles
    (attention, SSM) of each split; work launched on them stays on their SMs.  num_sms: of the device.
    """

    def __init__(self, device_index: int, granularity: int = GRANULARITY) -> None:
        """Split once into groups of `granularity` SMs, and combine k groups against the rest for every k.

        Raises PartitionUnavailable, with nothing left open.
        """
        self._driver = _driver()
        self._contexts: list[Any] = []
        self._open_streams: list[Any] = []
        self.splits: list[tuple[int, int]] = []
        self.streams: list[tuple[int, int]] = []
        try:
            self._prepare(device_index, granularity)
        except BaseException:
            _close(self._driver, self._open_streams, self._contexts)
            raise
        self._finalizer = weakref.finalize(self, _close, self._driver, self._open_streams, self._contexts)

    def _prepare(self, device_index: int, granularity: int) -> None:
        driver = self._driver
        sm_type = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        _call(driver, "cuInit", 0)
        device = _call(driver, "cuDeviceGet", device_index)
        resource = _call(driver, "cuDeviceGetDevResource", device, sm_type)
        self.num_sms = int(resource.sm.smCount)
        wanted = feasible_splits(self.num_sms, granularity)
        if not wanted:
            raise PartitionUnavailable(
                f"the device has {self.num_sms} SMs, too few for two partitions of {granularity}"
            )
        groups, count, _ = _call(driver, "cuDevSmResourceSplitByCount", len(wanted) + 1, resource, 0, granularity)
        if count < 2:
            raise PartitionUnavailable(f"the driver splits {self.num_sms} SMs into {count} groups of {granularity}")
        for k in range(1, count):
            sides = [self._open(device, part, sm_type) for part in (groups[:k], groups[k:count])]
            (attention_sms, attention_stream), (ssm_sms, ssm_stream) = sides
            self.splits.append((attention_sms, ssm_sms))
            self.streams.append((attention_stream, ssm_stream))

    def _open(self, device: Any, groups: list[Any], sm_type: Any) -> tuple[int, int]:
        """A green context over these groups and a stream in it: (granted SMs, the stream's handle)."""
        driver = self._driver
        descriptor = _call(driver, "cuDevResourceGenerateDesc", groups, len(groups))
        default_stream = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # the driver demands this flag
        context = _call(driver, "cuGreenCtxCreate", descriptor, device, default_stream)
        self._contexts.append(context)
        granted = int(_call(driver, "cuGreenCtxGetDevResource", context, sm_type).sm.smCount)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = _call(driver, "cuGreenCtxStreamCreate", context, flags, 0)
        self._open_streams.append(stream)
        return granted, int(stream)

    def close(self) -> None:
        """Wait for the streams' work, destroy them and the contexts; also done when the object goes. Twice is once."""
        self._finalizer()


def _driver() -> ModuleType:
    """`cuda.bindings.driver`."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise PartitionUnavailable(
            f"cuda.bindings cannot be imported ({error}): pip install 'flexops[cuda]'"
        ) from error


def _call(driver: ModuleType, name: str, *arguments: Any) -> Any:
    """The result of a driver call: one value as it is, several as a tuple."""
    try:
        error, *values = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as missing:  # an old package; no driver, or one without the function
        raise PartitionUnavailable(f"{name} cannot be called: {missing}") from missing
    if error != driver.CUresult.CUDA_SUCCESS:
        raise PartitionUnavailable(f"{name} failed with {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _close(driver: ModuleType, streams: list[Any], contexts: list[Any]) -> None:
    """Streams first, once they have nothing to do, then the contexts that they live in.

    No error is raised: where the process ends, the driver may be gone before.
    """
    for stream in streams:
        driver.cuStreamSynchronize(stream)
    while streams:
        driver.cuStreamDestroy(streams.pop())
    while contexts:
        driver.cuGreenCtxDestroy(contexts.pop())
