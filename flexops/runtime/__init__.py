"""The runtime: an engine with continuous batching over one paged memory."""

from ..config import EngineConfig
from .coordination import CostModel, DeviceSpeed
from .engine import Engine
from .request import RequestOutput, SamplingParams

__all__ = ["CostModel", "DeviceSpeed", "Engine", "EngineConfig", "RequestOutput", "SamplingParams"]
