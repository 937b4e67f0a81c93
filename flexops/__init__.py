"""flexops: fused operators and a runtime for request-adaptive hybrid attention/SSM language models."""

from .config import EngineConfig, FlexHybridConfig
from .models.modeling import FlexHybridModel, FlexHybridOutput

__version__ = "0.1.0"
__all__ = ["EngineConfig", "FlexHybridConfig", "FlexHybridModel", "FlexHybridOutput", "__version__"]
