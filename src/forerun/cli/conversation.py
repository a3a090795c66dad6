"""A chat as tokens: what the model wrote stays the tokens it wrote, so that its keys can be kept from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.errors import InvalidArgument
from forerun.inputs import render_chat, tokenize_rendered
from forerun.prompts import Message
from forerun.result import decode_text


class Conversation:
    """Messages, and the tokens of the last prompt with its answer."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.messages: list[Message] = []
        self._text = ""  # the last prompt and its answer, as text
        self._ids: list[int] = []  # and as tokens

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages.clear()
        self._text, self._ids = "", []

    def ask(self, question: str) -> list[int]:
        """Add a user's turn; returns the prompt."""
        self.messages.append({"role": "user", "content": question})
        try:
            return self.prompt()
        except InvalidArgument:  # the template refuses it: the conversation goes on without
            self.take_back()
            raise

    def prompt(self) -> list[int]:
        """The whole conversation as tokens. Where it goes on from the last answer, its tokens are kept."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = render_chat(self.tokenizer, [*start, *self.messages])
        if self._ids and text.startswith(self._text):
            ids = [*self._ids, *tokenize_rendered(self.tokenizer, text[len(self._text) :])]
        else:  # a template that rewrites earlier turns, a new system message, or the first turn
            ids = tokenize_rendered(self.tokenizer, text)
        self._text, self._ids = text, ids
        return ids

    def answer(self, tokens: Sequence[int]) -> str:
        """Add the model's turn."""
        said = decode_text(self.tokenizer, tokens)
        self.messages.append({"role": "assistant", "content": said})
        self._text += self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._ids = [*self._ids, *tokens]
        return said

    def take_back(self) -> None:
        """Drop a question that got no answer."""
        self.messages.pop()
        self._text, self._ids = "", []

    def fit(self, limit: int | None, reserve: int) -> tuple[list[int], int]:
        """The prompt, cut to leave `reserve` tokens of the context; and how many of the oldest turns that cost."""
        ids, dropped, before = self.prompt(), 0, list(self.messages)
        while limit is not None and len(ids) + reserve > limit and len(self.messages) > 1:
            del self.messages[: 2 if len(self.messages) > 2 else 1]
            dropped += 1
            ids = self.prompt()
        if limit is not None and len(ids) >= limit:
            self.messages = before  # no room was made by dropping them
            self.take_back()
            raise InvalidArgument(
                f"this message alone has {len(ids)} tokens and the context ends at {limit}: send a shorter one"
            )
        return ids, dropped
