"""The benchmark of coordination without a GPU: errors by hand, and the paths that only a GPU takes, on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import coordination
from common import Report, arguments

from tests import tiny

POINTS = {
    "measured_us": [10.0, 100.0, 1000.0],
    "predicted_us": [11.0, 98.0, 1000.0],
    "spread": [0.1, 0.02, 0.03],
    "wall_us": [20.0, 100.0, 1250.0],
    "wall_spread": [0.4, 0.5, 0.6],
}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["coordination.py", "--quick"])
    return Report("coordination", arguments("", plot=True))


def test_errors_by_hand(report, tmp_path):
    coordination.report_errors(report, {"attention": POINTS, "ssm": POINTS})
    found, _ = report.data["errors"]
    assert found["median"] == pytest.approx(0.02) and found["largest"] == pytest.approx(0.1)
    assert found["spread"] == 0.03 and found["wall_spread"] == 0.5
    assert found["wall_median"] == pytest.approx(0.2), "of 0.45, 0.02 and 0.2"
    coordination.plot(report.data, tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").stat().st_size > 1000


def test_what_only_a_gpu_runs(report, tmp_path, monkeypatch):
    """Every side and form, one branch after the other: wiring, no times."""
    monkeypatch.setattr(coordination, "copy_bandwidth", lambda device: 1e4)
    coordination.report_errors(report, {"attention": POINTS, "ssm": POINTS, "ffn": POINTS})
    coordination.end_to_end(report, tiny.make_model(), (2,), 8, 2)
    assert [row["batch"] for row in report.data["end_to_end"]] == ["2"]
    assert {"serial", "streams", "partition", "fused"} <= set(report.data["end_to_end"][0])
    coordination.layer_decodes(report, torch.device("cpu"), (4,), 40, repeats=1)
    assert report.data["layer_decodes"][0]["streams"] == "-"
    coordination.plot(report.data, tmp_path / "gpu.png")
    names = [check["name"] for check in report.checks]
    assert names[3:] == ["coordination_vs_serial", "coordination_vs_serial_mean", "decode_vs_bandwidth"]
