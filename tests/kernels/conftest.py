"""Kernel tests run with memory that shows what was never written."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty and its kin return NaN (the largest value for integers), so an unwritten output is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
