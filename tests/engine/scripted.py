"""Drafters that say what a test wants, and a model's own answers to say it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from forerun.engine import Engine, Request, RowResult
from forerun.math.laws import PointMass
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Draft, DraftContext
from support.finish import finished
from support.tiny import plain_greedy, tiny_model

VOCAB = 97
PROMPT = (12, 61, 7, 33, 85, 4)
# history, room -> tokens
Script = Callable[[Sequence[int], int], list[int]]


class Scripted:
    """Proposes whatever the script says, unchecked."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def propose(self, context: DraftContext) -> Draft:
        rows = [self.script(h, room) for h, room in zip(context.histories, context.max_lengths, strict=True)]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)
        return Draft(tokens, torch.tensor([len(row) for row in rows]), PointMass(tokens, context.vocab_size), True)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


@lru_cache
def answer(prompt: tuple[int, ...] = PROMPT, count: int = 60) -> tuple[int, ...]:
    """What the tiny Llama says next, greedily."""
    return tuple(plain_greedy(tiny_model("llama"), list(prompt), count))


def prophet(wrong: dict[int, int] | None = None, prompt: tuple[int, ...] = PROMPT) -> Scripted:
    """Knows the answer; at the output positions of `wrong` it says another token instead."""
    known = list(answer(prompt))
    for place, token in (wrong or {}).items():
        known[place] = token

    def script(history: Sequence[int], room: int) -> list[int]:
        place = len(history) - len(prompt)
        return known[place : place + room]

    return Scripted(script)


def fresh_places() -> list[int]:
    """Output positions whose token the answer has not used before: a stop id there stops there."""
    known = answer()
    return [i for i, token in enumerate(known) if token not in known[:i]]


class Spell:
    """A tokenizer that writes every token as its number in brackets."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(f"<{token}>" for token in tokens)


def engine_with(drafter: Any, length: int = 4, **settings: Any) -> Engine:
    return Engine(Scorer(tiny_model("llama")), drafter, Constant(length), **settings)


def finish(engine: Engine, *requests: Request) -> list[RowResult]:
    """Results in the order of the requests."""
    results = {result.request.request_id: result for result in finished(engine, requests)}
    return [results[request.request_id] for request in requests]


def run(drafter: Any, length: int = 4, tokenizer: Any = None, **fields: Any) -> RowResult:
    """One request to the end."""
    request = Request(**{"prompt": PROMPT, "max_new_tokens": 20, **fields})
    return finish(engine_with(drafter, length, tokenizer=tokenizer), request)[0]
