"""A Llama and the same weights in ours, left-padded prompts, and what listens to a run: for tests of `generate`."""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from flexops import EngineConfig, FlexHybridModel

VOCAB, PAD = 61, 1
SMALL = EngineConfig(memory_bytes=1 << 22, check_integrity=True)


def make_llama() -> LlamaForCausalLM:
    """Two layers, random, no end of text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=PAD,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model


def padded(lengths: tuple[int, ...] = (3, 9, 1, 6), seed: int = 0, pad: int = PAD) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def both(llama: LlamaForCausalLM, ours: FlexHybridModel, **kwargs: Any) -> torch.Tensor:
    """What both models generate, which must be the same; processors and criteria that keep state are copied."""
    wanted = llama.generate(**copy.deepcopy(kwargs))
    got = ours.generate(**copy.deepcopy(kwargs))
    assert got.dtype == wanted.dtype
    assert got.tolist() == wanted.tolist()
    return got


def greedy_tokens(llama: LlamaForCausalLM, steps: int = 12, **inputs: Any) -> list[list[int]]:
    """New tokens of a greedy run that nothing stops."""
    return llama.generate(**inputs, max_new_tokens=steps)[:, inputs["input_ids"].shape[1] :].tolist()


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class StopOn(StoppingCriteria):
    """Stops the rows that end with one of the tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


class Shift(LogitsProcessor):
    """Adds a fixed pattern, so that another token wins."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 5 * torch.cos(torch.arange(scores.shape[1]) * 1.7)
