"""What the recording of decode steps calls a change, on launches by hand and on a small engine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from decode_launches import Launch, changes

ROOT = Path(__file__).resolve().parents[2]


def launch(kernel: str, grid: int, heads: int = 1) -> Launch:
    return Launch(kernel, (("grid", grid), ("heads", heads)))


def test_changes_are_named_by_kernel():
    first = [launch("a", 4), launch("b", 2), launch("a", 8)]
    assert changes([first, list(first)]) == {}
    assert changes([first, [launch("a", 4), launch("b", 2), launch("a", 9)]]) == {"a": {"grid"}}
    assert changes([first, [launch("b", 2, heads=3), launch("a", 4), launch("a", 8)]]) == {"b": {"heads"}}
    assert changes([first, [launch("a", 5), launch("c", 1)]]) == {
        "a": {"grid", "number"},
        "b": {"number"},
        "c": {"number"},
    }


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_changes_as_contexts_grow_and_between_layouts():
    """In a process of its own: here kernels may be interpreted, which cannot be recorded."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "bench/decode_launches.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout.splitlines()[-1])["data"]
    assert data["within_powers_of_two"] == {}, "pages are crossed, and no launch changes"
    # from 256 to 257 keys a request gets a second split: more programs, and a launch that sums the splits
    assert set(data["within"]) <= {"decode", "decode_branches", "combine"}
    assert data["within"]["combine"] == ["number"] and "grid" in data["within"]["decode_branches"]
    assert "rows" in data["between"]["linear 64 -> 164"], "the SSM's in-projection has as many rows as requests took it"
    forms = {row["decode steps"]: row for row in data["host"]}
    assert all(row["waits of the host"] == 1 for row in forms.values()), "for the tokens alone"
    assert forms["with the context cache"]["launches"] > 0 < forms["without the context cache"]["copies from the host"]
    assert {"silu_mul", "split_norm", "linear 64 -> 256"} <= set(data["unchanged"])
