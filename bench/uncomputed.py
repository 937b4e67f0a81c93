"""Engines that compute no rows: what a cache keeps of forced layouts, and what it saves, does not depend on numbers.

So hit rates over many draws take seconds; `tests/bench/test_uncomputed.py` compares them with those of real engines.
"""

from unittest.mock import patch

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import Engine
from flexops.runtime.batch import PrefillSlice, StepBatch
from flexops.runtime.executor import Executor, _Rows


class _Uncomputed(Executor):
    """Plans, counts and keeps as its base does; the rows are whatever the memory holds."""

    def _run_layer(self, layer_idx: int, layer: object, step: StepBatch, rows: _Rows) -> None:
        self._count(layer_idx, rows.slices)
        rows.u = rows.delta = None

    def _refill(self, layer_idx: int, layer: object, step: StepBatch, slices: tuple[PrefillSlice, ...]) -> None:
        self._count(layer_idx, slices)


def uncomputed_engine(model: FlexHybridModel, config: EngineConfig) -> Engine:
    """An engine for requests with forced layouts that generate one token each."""
    with patch("flexops.runtime.engine.Executor", _Uncomputed):
        return Engine(model, config)
