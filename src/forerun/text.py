"""Tokens to text as they arrive, right for characters that span several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forerun.result import decode_text

UNFINISHED = "\ufffd"  # how tokenizers show bytes that are not yet a character
LEAST_CONTEXT, MOST_CONTEXT = 4, 64  # tokens: a character has up to four bytes; where there are none, no more help
MOST_PENDING = 16  # tokens whose bytes are no character yet: more are no beginning of one


class StreamDecoder:
    """Text of a growing sequence: a piece comes out once later tokens cannot change it.

    Only a short window is decoded: from the start of the piece before, since some tokenizers treat the first token of a
    sequence differently, to the newest token. However tokens are cut into pushes, the text is the same: that of
    `decode_text`, but for bytes that are no character. Where those follow a character that is written in bytes as well,
    some tokenizers give up that character too; here it is out by then, and stays.

    With `context` the sequence goes on from those tokens, whose own text does not come out. Special tokens are written
    out where they are not to be skipped.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = (), skip_special: bool = True) -> None:
        self._decode, self._is_joined = decoder_of(tokenizer, skip_special), joins_bytes(tokenizer)
        self.tokens: list[int] = []
        self._window = self._end_of(context)
        self._done = len(self._window)  # tokens of the window whose text is out ...
        self._before = self._decode(self._window)  # ... and that text

    def push(self, *tokens: int) -> str:
        """The text that became certain with these tokens; empty in the middle of a character."""
        self.tokens += tokens
        known = len(self._window)
        if self._is_joined and self._done == known:  # nothing before them can change their text: no window is needed
            text = self._decode(list(tokens))
            if text and UNFINISHED not in text:
                self._window, self._done, self._before = list(tokens), len(tokens), text
                return text
        self._window += tokens
        for end in range(len(self._window), max(known, len(self._window) - LEAST_CONTEXT), -1):
            text = self._new(end)
            if UNFINISHED not in text:
                rest = self._window[end:]
                del self._window[end:]
                return self._take(text) + self._push_each(rest) if rest else self._take(text)
        del self._window[known:]
        return self._push_each(tokens)

    def finish(self) -> str:
        """What is left, unfinished or not."""
        return self._take(self._new(len(self._window)))

    def _push_each(self, tokens: Sequence[int]) -> str:
        """Among bytes that are no character, what comes out must not depend on what was pushed together."""
        texts = []
        for token in tokens:
            self._window.append(token)
            text = self._new(len(self._window))
            if not text.endswith(UNFINISHED):
                texts.append(self._take(text))
            elif len(self._window) - self._done >= MOST_PENDING:
                texts.append(self._take_certain(text))
        return "".join(texts)

    def _take_certain(self, text: str) -> str:
        """Give out all but the last few tokens, which may be the beginning of a character.

        Bytes that are none may go on for ever, and are not to be decoded again with every token. Where two parts have
        the text that they have together, no character lies across them.
        """
        for end in range(len(self._window) - 1, len(self._window) - LEAST_CONTEXT - 1, -1):
            rest = self._window[end:]
            first, last = self._new(end), self._decode(rest)
            if last and first + last == text:
                del self._window[end:]
                taken = self._take(first)
                self._window += rest
                return taken
        return ""

    def _take(self, text: str) -> str:
        """Give out all of the window; it begins anew with the last tokens that have text as the first of a sequence."""
        if text:
            start, before = self._done, self._decode(self._window[self._done :])
            has_text = bool(before)
            while start and not has_text:
                start -= 1
                before = self._decode(self._window[start:])
                has_text = bool(before) and UNFINISHED not in before
            del self._window[:start]
            self._before = before
        else:  # thousands of special tokens are not to be decoded again and again
            self._window[self._done :] = [token for token in self._window[self._done :] if not self._is_silent(token)]
        self._done = len(self._window)
        return text

    def _new(self, end: int) -> str:
        """The window's text up to `end` that is not out."""
        text = self._decode(self._window[:end])
        if not text.startswith(self._before):  # characters became bytes again
            return self._decode(self._window[self._done : end])
        return text[len(self._before) :]

    def _is_silent(self, token: int) -> bool:
        """Whether it has no text anywhere: twice in a row, one of them is not the first of a sequence."""
        return not self._decode([token, token])

    def with_text(self) -> list[int]:
        """What of the window is not silent: at first, the context of one that writes special tokens out."""
        return [token for token in self._window if not self._is_silent(token)]

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """As much of it as has text, whole characters if there are: what the first new token follows."""
        size = LEAST_CONTEXT
        while size < len(context):
            text = self._decode(list(context[-size:]))
            if text and (UNFINISHED not in text or size >= MOST_CONTEXT):
                break
            size *= 2
        return list(context[-size:])


def decoder_of(tokenizer: Any, skip_special: bool = True) -> Callable[[list[int]], str]:
    """What `decode_text` does with this tokenizer, which may write special tokens out.

    Where that is a call of the library behind it and nothing else, that call: the way there takes five times as long,
    and a server goes it for every round of every stream.
    """
    if not _is_librarys(tokenizer):
        return partial(decode_text, tokenizer, skip_special=skip_special)
    return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special)


def joins_bytes(tokenizer: Any) -> bool:
    """Whether the text of tokens is that of their bytes, one after the other, and nothing else, as GPT-2's is."""
    from tokenizers.decoders import ByteLevel

    return _is_librarys(tokenizer) and isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)


def _is_librarys(tokenizer: Any) -> bool:
    """Whether nothing but the library behind it decodes."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character that spans several belongs to the last of them."""
    decoder = StreamDecoder(tokenizer)
    texts = [decoder.push(token) for token in tokens]
    return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []
