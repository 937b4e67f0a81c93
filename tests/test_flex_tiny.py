"""The model that ships: its gates tell lookups from text, and the routes they choose are what answers the lookups."""

import random

import pytest
from transformers import PreTrainedTokenizerBase

from flexops import EngineConfig, FlexHybridModel
from flexops.models.layout import layout_strip
from flexops.models.loading import FLEX_TINY, load
from flexops.runtime import Engine, RequestOutput, SamplingParams

# one token each, as in training
SAID = "sword soul king gold city house land priest father sea altar water bread fire wall tree servant night"
TEXT = (
    "In the beginning God",
    "And it came to pass in those days, that",
    "The module provides a function that",
    "A hacker is",
    "The people went up to the city, and the king sent men before them.",
)


@pytest.fixture(scope="module")
def loaded() -> tuple[FlexHybridModel, PreTrainedTokenizerBase]:
    model, tokenizer = load("flex-tiny")
    assert tokenizer is not None
    return model, tokenizer


def answers(
    loaded: tuple[FlexHybridModel, PreTrainedTokenizerBase], prompts: list[str], layout: str | None = None
) -> list[tuple[str, str]]:
    """Text and layout of each prompt's greedy continuation, all in one batch."""
    model, tokenizer = loaded
    engine = Engine(model, EngineConfig(memory_bytes=1 << 26))
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(tokenizer.eos_token_id,))
    ids = [engine.add_request(tokenizer(prompt)["input_ids"], params, layout) for prompt in prompts]
    last: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
    texts = tokenizer.batch_decode([last[i].token_ids for i in ids], skip_special_tokens=True)
    return [(text, layout_strip(last[i].layout)) for text, i in zip(texts, ids, strict=True)]


def lookups(count: int) -> tuple[list[str], list[str]]:
    """Lists, sentences and copies of random words, with the answers."""
    rng = random.Random(5)
    prompts, expected = [], []
    for i in range(count):
        words = rng.sample(SAID.split(), 16)
        pairs = list(zip(words[:8], words[8:], strict=True))
        key, value = rng.choice(pairs)
        if i % 3 == 0:
            prompts.append("".join(f"- {k}: {v}\n" for k, v in pairs) + f"\n- {key}:")
        elif i % 3 == 1:
            prompts.append(" ".join(f"The {k} is {v}." for k, v in pairs) + f"\n\nWhat is the {key}?")
        else:
            value = " ".join(words[:8])
            prompts.append(f"Copy: {value}\nAnswer:")
        expected.append(f" {value}")
    return prompts, expected


def test_lookups_are_answered_with_attention_and_only_with_it(loaded: tuple[FlexHybridModel, PreTrainedTokenizerBase]):
    prompts, expected = lookups(60)
    given = answers(loaded, prompts)
    right = sum(text == wanted for (text, _), wanted in zip(given, expected, strict=True))
    assert right >= 57
    assert all("A" in layout for _, layout in given)
    forgetful = answers(loaded, prompts, layout="ssm")
    assert sum(text == wanted for (text, _), wanted in zip(forgetful, expected, strict=True)) <= 3


def test_text_runs_without_attention(loaded: tuple[FlexHybridModel, PreTrainedTokenizerBase]):
    for text, layout in answers(loaded, list(TEXT)):
        assert layout == "SSSSSS"
        assert sum(c.isalpha() or c in " ,.;:'\n" for c in text) > 0.9 * len(text), "not recognisable English"


def test_the_card_has_the_measured_numbers():
    card = (FLEX_TINY / "README.md").read_text()
    for line in ("| adaptive (as served) | 3.709 | 100%", "| SSM only | 3.709 | 0%", "| text | SSSSSS 100% |"):
        assert line in card
    assert sum(file.stat().st_size for file in FLEX_TINY.iterdir()) <= 12_000_000
