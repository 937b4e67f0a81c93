"""Token ids to text while they arrive, for everything that streams."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# no character has more bytes than 4, so more tokens than this without a whole one are bytes that are not text
_MAX_HELD_TOKENS = 8
_CONTEXT_TOKENS = 6


class TextStream:
    """The text of a growing list of tokens, given out as soon as the next token cannot change it.

    A token may hold a part of a character, or its text may depend on the tokens before it (a leading space): such
    text is held back until it is whole, and new tokens are always decoded together with a few before them. The pieces
    joined are the decoded continuation of `prompt_ids`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context = 0  # where the context of the next piece begins
        self._done = len(self._ids)  # tokens whose text was given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain, "" while it is not."""
        piece = ""
        for token in token_ids:
            self._ids.append(token)
            piece += self._take(wait=len(self._ids) - self._done <= _MAX_HELD_TOKENS)
        return piece

    def finish(self) -> str:
        """What was held back, where the tokens end inside a character as the replacement character."""
        return self._take(wait=False)

    def _take(self, wait: bool) -> str:
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        if wait and text.endswith("\ufffd"):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
