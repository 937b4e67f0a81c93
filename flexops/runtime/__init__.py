"""The runtime: an engine with continuous batching over one paged memory."""

from ..config import EngineConfig
from .engine import Engine
from .request import RequestOutput, SamplingParams

__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams"]
