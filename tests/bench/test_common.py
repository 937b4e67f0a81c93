"""The report of a benchmark: what people read, what machines read, and the exit status."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from common import Report, Times, arguments, interleave, number, spread


def report(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    return Report("name", arguments("what it measures", plot=True))


def test_last_line_is_one_json_object(monkeypatch, capsys):
    made = report(monkeypatch, "--json", "--quick", "--plot", "x.png")
    assert made.options.quick and made.options.plot == Path("x.png")
    made.check("speedup", 2.0, 1.5)
    made.check("error", 0.01, 0.02, better="lower", noise=0.5)
    made.table("numbers", ("what", "value"), [("a", 1.0), ("b", "text")])
    made.data["more"] = [1, 2]
    with pytest.raises(SystemExit) as end:
        made.finish()
    assert end.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result) == ["bench", "machine", "versions", "checks", "data"]
    assert result["bench"] == "name" and result["data"] == {"more": [1, 2]}
    assert result["checks"] == [
        {"name": "speedup", "value": 2.0, "target": 1.5, "better": "higher", "ok": True},
        {"name": "error", "value": 0.01, "target": 0.02, "better": "lower", "ok": True, "noise": 0.5},
    ]
    assert result["machine"]["cores"] >= 1 and "torch" in result["versions"]


@pytest.mark.parametrize(("value", "better"), [(0.9, "higher"), (1.1, "lower")])
def test_a_missed_check_is_shown_and_fails(monkeypatch, capsys, value, better):
    made = report(monkeypatch)
    assert not made.check("it", value, 1.0, better)
    with pytest.raises(SystemExit) as end:
        made.finish()
    assert end.value.code == 1
    assert "MISSED" in capsys.readouterr().out


def test_a_noisy_run_says_so(monkeypatch, capsys):
    made = report(monkeypatch)
    made.check("it", 2.0, 1.0, noise=0.2)
    with pytest.raises(SystemExit):
        made.finish()
    assert "noisy run: the middle half of it" in capsys.readouterr().out


def test_sides_are_interleaved_in_alternating_order():
    calls = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert [len(t) for t in times.seconds.values()] == [3, 3]
    assert len(interleave({"a": lambda: None}, rounds=100, budget_s=0).seconds["a"]) == 3


def test_ratios_are_medians_over_rounds():
    times = Times({"old": [2.0, 8.0, 3.0], "new": [1.0, 2.0, 1.0]})
    assert times.ratio("old", "new") == 3.0 and times.median("old") == 3.0
    assert spread([1.0, 1.0, 1.0]) == 0.0 and spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.5, "1,234"), (1.234, "1.23"), (0.01234, "0.0123"), (float("inf"), "inf")]
)
def test_numbers_show_three_digits(value, text):
    assert number(value) == text
