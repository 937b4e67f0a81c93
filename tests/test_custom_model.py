"""The example of a custom model runs, agrees with its dense form, and notices when an operator is wrong."""

import importlib.util
import sys
from pathlib import Path

import pytest

from flexops import kernels


@pytest.fixture
def example(monkeypatch):
    path = Path(__file__).parent.parent / "examples" / "custom_model.py"
    spec = importlib.util.spec_from_file_location("custom_model", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_agrees_with_the_dense_computation(example, backend, capsys):
    with kernels.backend(backend):
        assert example.main() < 1e-5
    assert capsys.readouterr().out.endswith("the dense computation gives the same tokens\n")


def test_notices_a_wrong_operator(example, monkeypatch):
    def half_of(*args):
        out, squares = kernels.state_update(*args)
        return out / 2, squares

    fake = type("fk", (), {**vars(kernels), "state_update": staticmethod(half_of)})
    monkeypatch.setattr(example, "fk", fake)
    with kernels.backend("reference"), pytest.raises(SystemExit, match="differs from the dense computation"):
        example.main()
