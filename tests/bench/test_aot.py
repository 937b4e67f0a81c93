"""Compilation without a GPU, on one small kernel."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_one_kernel_compiles_and_its_resources_are_reported():
    command = [sys.executable, "bench/aot.py", "--quick", "--only", "silu_mul", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [c["name"] for c in result["checks"]] == ["silu_mul.sm_90.stack"]
    kernel = result["data"]["kernels"][0]
    assert kernel["stack"] == kernel["STL"] == 0 and kernel["registers"] > 0
    assert kernel["LDG.128"] >= 2  # gate and up, 16 bytes at a time
    assert kernel["HMMA"] == kernel["HGMMA"] == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_each_target_gets_the_tiles_that_are_launched_on_it():
    code = (
        "import torch, aot_specs\n"
        "aot_specs.SIZES['one'] = aot_specs.LARGE, torch.bfloat16, ('paged_attention',)\n"
        "for target in (80, 90):\n"
        "    tiles = {s.kernel: dict(s.constants)['BLOCK_KEYS'] for s in aot_specs.specs(['one'], target)[:2]}\n"
        "    print(tiles['paged_attention_prefill'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT / "bench")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["32", "64"]
