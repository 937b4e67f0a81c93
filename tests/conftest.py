"""Where there is no GPU, Triton kernels run under its interpreter: set up before anything imports a kernel.

Tests of anything but the kernels run as users do on such a machine: without the interpreter, in the CPU forms.
"""

import importlib
import importlib.util
import os

import pytest
import torch

# the models of the tests are tiny: a second thread would only wait; pytest -n 2 uses a second core
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from tests import triton_interpreter

    triton_interpreter.install()
    # here, where the interpreter is on: which test imports the kernels first must not matter
    importlib.import_module("flexops.kernels.triton_backend")


@pytest.fixture(autouse=True)
def _interpreter_for_kernels_alone(request, monkeypatch):
    if "kernels" not in request.path.parts:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
