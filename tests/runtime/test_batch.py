"""Index tensors of a step: how they reach a device, and how wide a page table is."""

import numpy as np
import pytest
import torch

from flexops import EngineConfig
from flexops.runtime import Engine, SamplingParams
from flexops.runtime.batch import StepBatch, on_device
from tests.tiny import make_model


def test_numbers_go_to_a_gpu_without_a_wait(monkeypatch):
    """A wiring test: what is asked of torch."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: asked.append((str(device), how)) or self)
    sent = on_device([3, 1], np.int32, torch.device("cuda", 1))
    assert asked == ["pin", ("cuda:1", {"non_blocking": True})]
    assert sent.dtype == torch.int32 and sent.tolist() == [3, 1]


def test_on_a_cpu_nothing_is_copied():
    array = np.arange(5, dtype=np.int64)
    assert on_device(array, np.int64, torch.device("cpu")).data_ptr() == array.ctypes.data
    assert on_device(array[::2], np.int32, torch.device("cpu")).tolist() == [0, 2, 4]


@pytest.mark.parametrize(("tokens", "columns"), [(15, 1), (16, 2), (40, 4), (63, 4), (64, 8), (130, 16)])
def test_page_tables_are_a_power_of_two_wide(tokens, columns):
    """One more token is decoded behind so many. -1 stands behind a request's own pages."""
    engine = Engine(make_model(), EngineConfig(memory_bytes=1 << 23))
    engine.add_request(list(range(2, 2 + tokens)), SamplingParams(max_new_tokens=3), layout="attention")
    while not any(request.output for request in engine.scheduler.running):
        engine.step()
    engine.scheduler.make_room()
    slots = np.array([engine.scheduler.running[0].slot])
    step = StepBatch(engine.tables, slots, torch.device("cpu"))
    table = step.attention(0, step.split(0, ()).attention).page_table
    assert engine.pool.layout.page_tokens == 16 and table.shape == (1, columns)
    needed = tokens // 16 + 1
    assert (table[:, :needed] >= 0).all() and (table[:, needed:] == -1).all()
