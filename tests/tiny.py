"""A random model of a few thousand parameters with a byte-level tokenizer, for tests that need no meaning."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexops import FlexHybridConfig, FlexHybridModel

EOS, PAD = "<|endoftext|>", "<|pad|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and two special ones in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([EOS, PAD, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([EOS, PAD])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def make_model(seed: int = 0, **sizes: object) -> FlexHybridModel:
    """Three adaptive layers, hidden size 32, with weights large enough that logits and routes differ."""
    defaults = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    return FlexHybridModel(FlexHybridConfig(**{**defaults, **sizes})).eval()


def save(folder: Path, **sizes: object) -> Path:
    """The model and its tokenizer in a folder, as a user would have them."""
    make_model(**sizes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
