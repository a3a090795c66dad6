"""What is asked: questions as chats or texts, or random token ids, in the fields of OpenAI's interface."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from forerun.bench.prompts import Question
from forerun.bench.settings import ServeSettings

IDS = range(100, 500)
"""Ids that every vocabulary has, and that are seldom special."""


class RequestBodies:
    """Bodies by number: the same number always asks the same, so that levels can be compared."""

    def __init__(self, settings: ServeSettings, questions: Sequence[Question], model: str) -> None:
        self.settings, self.model = settings, model
        self.texts = [question.text for question in questions]
        random.Random(settings.seed).shuffle(self.texts)

    def body(self, number: int, speculation: str | None) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self._length("answer", number, settings.shortest_answer, settings.max_new_tokens),
            "temperature": settings.temperature,
            **self._prompt(number),
        }
        if settings.temperature > 0:
            body["seed"] = settings.seed + number
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if speculation is not None:
            body["speculation"] = {"enabled": speculation == "on"}
        return body

    def _prompt(self, number: int) -> dict[str, Any]:
        settings = self.settings
        if settings.prompt_length is not None:
            rng = random.Random(f"{settings.seed} {number}")
            length = self._length("prompt", number, settings.shortest_prompt, settings.prompt_length)
            return {"prompt": rng.choices(IDS, k=length)}
        text = self.texts[number % len(self.texts)]
        if settings.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def _length(self, what: str, number: int, shortest: int | None, longest: int) -> int:
        """The longest, or where a shortest one is asked for, any between them."""
        if shortest is None:
            return longest
        return random.Random(f"{self.settings.seed} {number} {what}").randint(shortest, longest)
