"""Tokens to text as they arrive, right for characters that span several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forerun.result import decode_text

UNFINISHED = "\ufffd"  # how tokenizers show bytes that are not yet a character


class StreamDecoder:
    """Text of a growing sequence: a piece comes out once later tokens cannot change it.

    Only a short window is decoded: from the start of the piece before, since some tokenizers treat the first token of a
    sequence differently, to the newest token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = decoder_of(tokenizer)
        self.tokens: list[int] = []
        self._start = 0  # of the window
        self._done = 0  # tokens whose text is out

    def push(self, *tokens: int) -> str:
        """The text that became certain with these tokens; empty in the middle of a character."""
        known = len(self.tokens)
        self.tokens += tokens
        for end in range(len(self.tokens), known, -1):
            text = self._text(end)
            if not text.endswith(UNFINISHED):
                return self._take(text, end)
        return ""

    def finish(self) -> str:
        """What is left, unfinished or not."""
        return self._take(self._text(len(self.tokens)), len(self.tokens))

    def _take(self, text: str, end: int) -> str:
        before = self._text(self._done)
        if self._done < end:
            self._start, self._done = self._done, end
        return text[len(before) :]

    def _text(self, end: int) -> str:
        return self._decode(self.tokens[self._start : end])


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """What `decode_text` does with this tokenizer.

    Where that is a call of the library behind it and nothing else, that call: the way there takes five times as long,
    and a server goes it for every round of every stream.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    ):
        return partial(decode_text, tokenizer)
    return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character that spans several belongs to the last of them."""
    decoder = StreamDecoder(tokenizer)
    texts = [decoder.push(token) for token in tokens]
    return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []
