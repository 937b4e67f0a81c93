"""What the recording of decode steps calls a change, on launches by hand and on a small engine."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from decode_launches import Launch, StaticForm, Step, changes

ROOT = Path(__file__).resolve().parents[2]


def launch(kernel: str, grid: int, heads: int = 1, address: int = 64) -> Launch:
    return Launch(kernel, (("grid", grid), ("heads", heads)), (address,))


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


def test_addresses_count_where_they_are_to_hold_still():
    steps = [[launch("a", 4)], [launch("a", 4, address=128)]]
    assert changes(steps) == {} and changes(steps, addresses=True) == {"a": {"addresses"}}


def test_static_steps_are_compared_within_their_bucket():
    """Steps that open a bucket may make tensors; one whose kernels come in another order is a change as well."""

    def step(rows: int, launches: list[Launch], memory: int) -> Step:
        return Step(launches, Counter(memory=memory, copies=1, waits=1), (rows, 16, 0))

    two, eight = [launch("a", 2), launch("b", 1)], [launch("a", 8), launch("b", 1)]
    steps = [step(2, two, 9), step(2, two, 0), step(8, eight, 5), step(8, eight, 0), step(8, eight, 7)]
    form = StaticForm.of([(2, steps)])
    assert (form.steps, form.buckets, form.opened, form.opening, form.launches) == (4, 2, 2, 9, 2)
    assert form.host == {"memory": 0, "copies": 1, "waits": 1} and not form.changed and not form.reordered
    turned = StaticForm.of([(2, [*steps[:2], step(2, two[::-1], 3), steps[0]])])
    assert turned.reordered == 1 and turned.host["memory"] == 3 and not turned.changed
    other = StaticForm.of([(2, steps), (1, [step(2, [launch("a", 2), launch("b", 3)], 0), steps[0]])])
    assert other.changed == {"b": {"grid"}} and other.requests == {2: {1, 2}, 8: {2}}


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
    for name in ("without the context cache", "with the context cache"):
        static, form = data["static"][f"static, {name}"], forms[f"static, {name}"]
        assert static["changed"] == {}, "kernels, grids, numbers and addresses"
        assert static["steps"] > 10 * static["opened"] and static["requests by rows"]["4"] == [3, 4]
        assert static["buckets"] >= 2, "page tables of 16 and of 32 columns"
        assert [form[column] for column in ("tensors made", "copies from the host", "waits of the host")] == [0, 1, 1]
