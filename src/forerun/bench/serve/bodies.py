"""What is asked: questions as chats or texts, or random token ids, in the fields of OpenAI's interface."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from forerun.bench.prompts import Question
from forerun.bench.settings import ServeSettings

IDS = range(100, 1000)
"""Ids that every vocabulary has, and that are seldom special."""


class Bodies:
    """Bodies by number: the same number always asks the same, so that levels can be compared."""

    def __init__(self, settings: ServeSettings, questions: Sequence[Question], model: str) -> None:
        self.settings, self.model = settings, model
        self.texts = [question.text for question in questions]
        random.Random(settings.seed).shuffle(self.texts)

    def body(self, number: int, speculation: str | None) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
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
            return {"prompt": rng.choices(IDS, k=settings.prompt_length)}
        text = self.texts[number % len(self.texts)]
        if settings.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}
