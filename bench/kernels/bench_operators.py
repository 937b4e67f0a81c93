"""Each operator against the unfused torch form, and against other packages on a GPU: same inputs as the tests.

The raw operators are timed, without argument checks, as the runtime calls them. On a GPU, `percent_of_copy_bandwidth`
is what the least bytes of the call would need at the speed of a plain copy, over the time it took.
"""

from collections.abc import Callable
from functools import partial

import others
import pytest
import torch
import unfused
from least_bytes import LEAST
from torch.utils._pytree import tree_leaves

from flexops.kernels.dispatch import select
from tests.kernels import inputs

CALLS_PER_ROUND = 20  # on a GPU: launches run ahead, and the device is waited for once
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def _time(benchmark, call: Callable, case: str, arguments: tuple, copy_bandwidth: float | None) -> None:
    """Run the benchmark of one side; groups are compared with each other in the table."""
    if copy_bandwidth is None:
        benchmark(call)
        return

    def round_of_calls() -> None:
        for _ in range(CALLS_PER_ROUND):
            call()
        torch.cuda.synchronize()

    benchmark.pedantic(round_of_calls, rounds=20, warmup_rounds=2)
    seconds = benchmark.stats.stats.median / CALLS_PER_ROUND
    benchmark.extra_info["us_per_call"] = seconds * 1e6
    benchmark.extra_info["percent_of_copy_bandwidth"] = 100 * LEAST[case](*arguments) / copy_bandwidth / seconds


def _arguments(case: str, size: Callable, dtype: torch.dtype, gpu: bool) -> tuple:
    device = torch.device("cuda" if gpu else "cpu")
    return inputs.arguments(case, size(case), dtype, device)


def _operator(case: str, gpu: bool) -> Callable:
    return getattr(select(torch.device("cuda" if gpu else "cpu")), inputs.operator(case))


@pytest.mark.parametrize("side", ["flexops", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", inputs.CASES)
def bench_operator(benchmark, case, dtype, side, size, gpu, copy_bandwidth):
    benchmark.group = f"{case} {str(dtype).removeprefix('torch.')}"
    arguments = _arguments(case, size, dtype, gpu)
    ours, plain = _operator(case, gpu), getattr(unfused, inputs.operator(case))
    if case != "ssd_scan":  # its torch form starts from empty states
        _assert_same(case, ours(*arguments), plain(*_arguments(case, size, dtype, gpu)), dtype)
    call = partial(ours if side == "flexops" else plain, *arguments)
    with torch.inference_mode():
        _time(benchmark, call, case, arguments, copy_bandwidth)


def _assert_same(case: str, ours: object, theirs: object, dtype: torch.dtype) -> None:
    """Both sides compute the same, but for rounding: torch rounds every step to the dtype.

    Differences are measured against the largest value: among a million results, some are small by cancellation.
    """
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for x, y in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        largest = float(y.abs().max()) if y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * largest, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize(("case", "package"), others.SIDES, ids=lambda v: v)
def bench_other_package(benchmark, case, package, size, gpu, copy_bandwidth):
    if not gpu:
        pytest.skip(f"{package} runs on CUDA: --gpu")
    arguments = _arguments(case, size, torch.bfloat16, gpu)
    call = others.side(case, package, arguments)
    if call is None:
        pytest.skip(f"{package} is not installed")
    benchmark.group = f"{case} bfloat16"
    with torch.inference_mode():
        _time(benchmark, call, case, arguments, copy_bandwidth)
