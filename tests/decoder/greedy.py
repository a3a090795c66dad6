"""Prompts, what plain decoding makes of them, and drafters and policies by name: for the tests of greedy text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import forerun
from forerun.policy import BassHeuristic, Constant, HfHeuristic
from support.devices import draft_on, model_on
from support.ties import deviation
from support.tiny import plain_greedy, ragged_prompts

NEW = 24  # with prompts of up to 20 tokens, several times the sliding windows of 8
VOCAB = 97


@lru_cache
def prompts_of(family: str) -> list[list[int]]:
    return ragged_prompts(8, VOCAB, seed=len(family))


@lru_cache
def oracle(family: str, device: str = "cpu") -> tuple[list[list[int]], float]:
    """Plain decoding of each prompt alone, and the model's own numerical noise."""
    model, prompts = model_on(family, device), prompts_of(family)
    wanted = [plain_greedy(model, prompt, NEW) for prompt in prompts]
    return wanted, deviation(model, [*prompts[1], *wanted[1]])


@lru_cache
def table(family: str, device: str) -> forerun.NgramTable:
    wanted, _ = oracle(family, device)
    texts = [[*prompt, *output] for prompt, output in zip(prompts_of(family), wanted, strict=True)]
    return forerun.NgramTable.count(texts[::2], vocab_size=VOCAB)  # half of the answers: some drafts hold, some do not


def make_drafter(name: str, family: str, device: str = "cpu") -> Any:
    makers = {
        "none": lambda: None,
        "model": lambda: forerun.DraftModel(draft_on(family, device)),
        "lookup": lambda: forerun.PromptLookup(),
        "table": lambda: table(family, device),
        "exit": lambda: forerun.EarlyExit(1),
        "random": lambda: forerun.RandomDraft(),
        "chain": lambda: forerun.Chain(forerun.PromptLookup(min_ngram=2), forerun.DraftModel(draft_on(family, device))),
    }
    return makers[name]()


def make_policy(name: str | int) -> Any:
    return (
        {"hf": HfHeuristic(), "bass": BassHeuristic(), "auto": "auto"}[name]
        if isinstance(name, str)
        else Constant(name)
    )
