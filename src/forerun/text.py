"""Tokens to text as they arrive, right for characters that span several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.result import decode_text

UNFINISHED = "\ufffd"  # how tokenizers show bytes that are not yet a character


class StreamDecoder:
    """Text of a growing sequence: a piece comes out once later tokens cannot change it.

    Only a short window is decoded: from the start of the piece before, since some tokenizers treat the first token of a
    sequence differently, to the newest token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self._start = 0  # of the window
        self._done = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty in the middle of a character."""
        self.tokens.append(token)
        text = self._text(len(self.tokens))
        return "" if text.endswith(UNFINISHED) else self._take(text)

    def finish(self) -> str:
        """What is left, unfinished or not."""
        return self._take(self._text(len(self.tokens)))

    def _take(self, text: str) -> str:
        before = self._text(self._done)
        if self._done < len(self.tokens):
            self._start, self._done = self._done, len(self.tokens)
        return text[len(before) :]

    def _text(self, end: int) -> str:
        return decode_text(self.tokenizer, self.tokens[self._start : end])


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character that spans several belongs to the last of them."""
    decoder = StreamDecoder(tokenizer)
    texts = [decoder.push(token) for token in tokens]
    return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []
