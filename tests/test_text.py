"""The pieces of a text stream, joined, are the text; none of them can change later."""

import random

import pytest

from flexops.text import TextStream
from tests import tiny

TEXTS = ["plain words", "naïve café — 中文, 日本語", "🎉🙂 emoji 👩‍👩‍👧", "", "\n\n  spaces  \t", "é"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "a prompt "])
def test_pieces_join_to_the_text(tokenizer, text, prompt):
    prompt_ids, ids = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, prompt_ids)
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes(tokenizer, seed):
    """Bytes that are no text: as many replacement characters as decoding at once, or a few more, and all the rest."""
    rng = random.Random(seed)
    ids = [rng.randrange(2, 258) for _ in range(rng.randrange(80))]
    stream = TextStream(tokenizer)
    text = "".join(stream.push(ids[i : i + 3]) for i in range(0, len(ids), 3)) + stream.finish()
    assert text.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_text_is_held_until_it_is_whole(tokenizer):
    stream = TextStream(tokenizer)
    ids = tokenizer("é!")["input_ids"]
    assert [stream.push([token]) for token in ids] == ["", "é", "!"]


def test_bytes_that_never_become_text_are_not_held_for_ever(tokenizer):
    stream = TextStream(tokenizer)
    continuation_byte = tokenizer("é")["input_ids"][1]
    assert "\ufffd" in stream.push([continuation_byte] * 20)


def test_special_tokens_give_no_text(tokenizer):
    stream = TextStream(tokenizer, [5, 6])
    assert stream.push([tokenizer.eos_token_id]) + stream.finish() == ""
