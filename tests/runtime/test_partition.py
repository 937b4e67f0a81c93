"""SM partitions against a driver that is none: wiring tests of the calls, their order, what is left open, and errors.

They prove nothing about isolation or speed; tests/gpu does.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexops.runtime.partition import PartitionUnavailable, SMPartitions

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")
SCRIPT = """
import json, os, sys
from flexops.runtime.partition import PartitionUnavailable, SMPartitions
for line in sys.stdin:
    asked = json.loads(line)
    for name in [name for name in os.environ if name.startswith("FAKE_CUDA_")]:
        del os.environ[name]
    os.environ.update(asked["environment"])
    try:
        made = SMPartitions(*asked["arguments"])
        answer = {"splits": made.splits, "streams": made.streams, "num_sms": made.num_sms}
        if asked["close"]:
            made.close()
            made.close()
        del made
    except PartitionUnavailable as reason:
        answer = {"reason": str(reason)}
    print(json.dumps(answer), flush=True)
"""


def has_driver_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


needs_bindings = pytest.mark.skipif(not has_driver_bindings(), reason="cuda.bindings is not installed")


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory):
    """A folder with libcuda.so.1, compiled here."""
    if COMPILER is None or importlib.util.find_spec("triton") is None:
        pytest.skip("no C compiler, or no triton, whose package has cuda.h")
    headers = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/include"
    folder = tmp_path_factory.mktemp("driver")
    command = [COMPILER, "-shared", "-fPIC", "-I", headers, HERE / "fake_libcuda.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return folder


class Process:
    """A process with that driver, in which SMPartitions are made as often as a test asks."""

    def __init__(self, folder: Path, traces: Path) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, "-c", SCRIPT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=HERE.parents[1], **pipes)
        self.traces, self.asked = traces, 0

    def __call__(self, *arguments: int, close: bool = True, **fake: object) -> tuple[dict, list[tuple[str, str, int]]]:
        """What came of SMPartitions(*arguments), and the calls as (name, handle, count), with those of its close."""
        self.asked += 1
        trace = self.traces / f"trace{self.asked}"
        trace.write_text("")
        environment = variables({"trace": trace, **fake})
        asked = {"arguments": arguments or (0,), "close": close, "environment": environment}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        lines = (line.split() for line in trace.read_text().splitlines())
        return answer, [(name, handle, int(count)) for name, handle, count in lines]

    def close(self) -> None:
        self.process.communicate()


def variables(fake: dict[str, object]) -> dict[str, str]:
    return {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in fake.items()}


@pytest.fixture(scope="module")
def wiring(driver_folder, tmp_path_factory):
    process = Process(driver_folder, tmp_path_factory.mktemp("traces"))
    yield process
    process.close()


def left_open(calls: list[tuple[str, str, int]]) -> list[str]:
    """What was made and not destroyed; a thing destroyed twice fails here."""
    alive = []
    for name, handle, _ in calls:
        if name in ("+context", "+stream"):
            alive.append(name[1:] + handle)
        elif name in ("-context", "-stream"):
            alive.remove(name[1:] + handle)
    return alive


@needs_bindings
def test_seven_splits_of_128_of_132_sms(wiring):
    made, calls = wiring()
    assert made["num_sms"] == 132
    assert made["splits"] == [[16 * k, 128 - 16 * k] for k in range(1, 8)]
    streams = [stream for pair in made["streams"] for stream in pair]
    assert len(set(streams)) == 14 and 0 not in streams
    names = [name for name, _, _ in calls]
    assert names[:4] == ["cuInit", "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"]
    assert names.count("cuDevSmResourceSplitByCount") == 1, "splits of splits may overlap"
    one = ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "+context", "cuGreenCtxGetDevResource"]
    assert names[4:10] == [*one, "cuGreenCtxStreamCreate", "+stream"]
    assert names[4:88] == names[4:10] * 14
    assert names[88:102] == ["cuStreamSynchronize"] * 14, "nothing is destroyed while it works"
    assert names[102:] == ["-stream"] * 14 + ["-context"] * 14, "streams go before the contexts that they live in"
    assert left_open(calls) == []


@needs_bindings
@pytest.mark.parametrize(
    ("sms", "granularity", "splits"),
    [
        (132, 20, [[24, 96], [48, 72], [72, 48], [96, 24]]),  # rounded up to multiples of 8
        (148, 16, [[16 * k, 144 - 16 * k] for k in range(1, 9)]),
        (108, 32, [[32, 64], [64, 32]]),
        (32, 16, [[16, 16]]),
    ],
)
def test_other_devices_and_granularities(wiring, sms, granularity, splits):
    made, calls = wiring(0, granularity, sms=sms)
    assert made["splits"] == splits and left_open(calls) == []


@needs_bindings
def test_partitions_that_nobody_closes_are_closed_when_they_go(wiring):
    made, calls = wiring(close=False)
    assert len(made["splits"]) == 7 and left_open(calls) == []
    assert [name for name, _, _ in calls][-28:] == ["-stream"] * 14 + ["-context"] * 14


@needs_bindings
def test_the_granted_counts_are_read_back(wiring):
    made, _ = wiring(extra=2)
    assert made["splits"][0] == [18, 114] and made["splits"][6] == [114, 18]


@needs_bindings
@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"])
def test_an_error_names_the_call_and_the_code(wiring, name):
    made, calls = wiring(fail=f"{name} 1 801")
    assert made == {"reason": f"{name} failed with CUDA_ERROR_NOT_SUPPORTED"}
    assert "cuGreenCtxCreate" not in [call[0] for call in calls]


@needs_bindings
@pytest.mark.parametrize("name", ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
@pytest.mark.parametrize("nth", [1, 2, 14])
def test_a_failure_half_way_leaves_nothing_open(wiring, name, nth):
    made, calls = wiring(fail=f"{name} {nth} 2")
    assert made == {"reason": f"{name} failed with CUDA_ERROR_OUT_OF_MEMORY"}
    assert left_open(calls) == []
    assert [call[0] for call in calls].count("-context") == nth - (name != "cuGreenCtxStreamCreate")


@needs_bindings
def test_devices_that_cannot_be_split(wiring):
    assert wiring(sms=24)[0] == {"reason": "the device has 24 SMs, too few for two partitions of 16"}
    assert wiring(0, 60, sms=124)[0] == {"reason": "the driver splits 124 SMs into 1 groups of 60"}
    assert wiring(3)[0] == {"reason": "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE"}


@needs_bindings
def test_a_driver_without_green_contexts(driver_folder, tmp_path):
    process = Process(driver_folder, tmp_path)  # the bindings look for the driver's functions once
    made, calls = process(missing="cuGreenCtxCreate")
    process.close()
    assert made["reason"].startswith("cuGreenCtxCreate cannot be called: ")
    assert left_open(calls) == []


@needs_bindings
def test_no_driver(tmp_path):
    process = Process(tmp_path, tmp_path)
    made, _ = process()
    process.close()
    if "reason" not in made:
        pytest.skip("this machine has a driver")
    assert made["reason"].startswith("cuInit cannot be called: ")


def test_no_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(
        PartitionUnavailable, match=r"cuda.bindings cannot be imported .* pip install 'flexops\[cuda\]'"
    ):
        SMPartitions(0)
