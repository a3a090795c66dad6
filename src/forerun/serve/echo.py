"""Prompts that are told again in front of their answers, with log-probabilities where they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from forerun.engine.row import TokenLogprob
from forerun.serve.answer_text import PROMPT, TextPiece
from forerun.serve.backend import Backend
from forerun.text import pieces as texts_of

SHORT_PROMPT = 256  # tokens: their pieces are made sooner than a thread wakes


class Echo:
    """Pieces of the prompts of one call, made once for all sequences that follow the same."""

    def __init__(self, tokenizer: Any, backend: Backend, alternatives: int | None) -> None:
        self._tokenizer, self._backend, self._alternatives = tokenizer, backend, alternatives
        self._made: dict[tuple[int, ...], list[TextPiece]] = {}
        self._turn = asyncio.Lock()

    async def of(self, prompt: tuple[int, ...]) -> list[TextPiece]:
        async with self._turn:
            if prompt not in self._made:
                self._made[prompt] = await self._make(prompt)
        return self._made[prompt]

    async def _make(self, prompt: tuple[int, ...]) -> list[TextPiece]:
        scores: Sequence[TokenLogprob | None] = (None,) * len(prompt)
        if self._alternatives is not None:
            scores = await self._backend.prompt_logprobs(prompt, self._alternatives)
        if len(prompt) <= SHORT_PROMPT:
            return self._pieces(prompt, scores)
        return await asyncio.to_thread(self._pieces, prompt, scores)

    def _pieces(self, prompt: tuple[int, ...], scores: Sequence[TokenLogprob | None]) -> list[TextPiece]:
        texts = texts_of(self._tokenizer, prompt)
        return [TextPiece(text, token, PROMPT, lp) for text, token, lp in zip(texts, prompt, scores, strict=True)]
