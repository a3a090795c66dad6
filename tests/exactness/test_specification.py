"""The engine against the algorithm as the papers print it, token for token."""

from __future__ import annotations

import pytest

from exactness.sampling import PLAIN, counted
from forerun.config import SamplingParams
from forerun.decode import speculative_decode
from forerun.drafters import Chain, DraftModel, EarlyExit, PromptLookup, RandomDraft
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.tiny import draft_of, tiny_model

VOCAB = 29
PROMPT = (3, 14, 15, 9, 2, 6, 14, 15)
KINDS = ("model", "doubting", "lookup", "ngram", "random", "exit", "chain")


def drafter_for(kind: str, target: Scorer) -> Drafter:
    draft = draft_of(tiny_model("llama", vocab=VOCAB), 0.1)
    if kind == "exit":
        exit_ = EarlyExit(1)
        exit_.bind(target)
        return exit_
    made: dict[str, Drafter] = {
        "model": DraftModel(draft),
        "doubting": DraftModel(draft, stop_below=0.2),
        "lookup": PromptLookup(),
        "ngram": counted(VOCAB),
        "random": RandomDraft(),
        "chain": Chain(PromptLookup(min_ngram=2), DraftModel(draft)),
    }
    return made[kind]


def by_the_book(kind: str, rule: Rule, length: int, params: SamplingParams, seed: int, tokens: int) -> list[list[int]]:
    target = Scorer(tiny_model("llama", vocab=VOCAB))
    rounds = speculative_decode(
        target, drafter_for(kind, target), PROMPT, draft_length=length, max_new_tokens=tokens, params=params, rule=rule,
        seed=seed, request_id=9,
    )  # fmt: skip
    return list(rounds)


def by_the_engine(
    kind: str, rule: Rule, length: int, params: SamplingParams, seed: int, tokens: int, company: int = 0
) -> list[list[int]]:
    target = Scorer(tiny_model("llama", vocab=VOCAB))
    engine = Engine(target, drafter_for(kind, target), Constant(length), rule=rule)
    asked = Request(prompt=PROMPT, max_new_tokens=tokens, params=params, seed=seed, request_id=9)
    number = engine.add(asked)
    for i in range(company):
        engine.add(Request(prompt=PROMPT[: 1 + i], max_new_tokens=5 + i, params=params, seed=i, request_id=i))
    rounds = []
    while not engine.is_idle:
        mine = (progress for progress in engine.step() if (progress.row, progress.request_id) == (number, 9))
        rounds += [list(progress.tokens) for progress in mine]
    return rounds


@pytest.mark.quick("lookup-block")
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("kind", KINDS)
def test_same_rounds(kind: str, rule: Rule) -> None:
    for length, seed in ((1, 0), (3, 1), (5, 2)):
        expected = by_the_book(kind, rule, length, PLAIN, seed, 16)
        assert sum(map(len, expected)) == 16
        assert by_the_engine(kind, rule, length, PLAIN, seed, 16) == expected


@pytest.mark.quick("model")
@pytest.mark.parametrize("kind", KINDS)
def test_same_rounds_in_company(kind: str) -> None:
    """Neighbours move logits by rounding alone, far less than it takes to change one of a few draws."""
    expected = by_the_book(kind, Rule.TOKEN, 4, PLAIN, 5, 24)
    assert by_the_engine(kind, Rule.TOKEN, 4, PLAIN, 5, 24, company=6) == expected


@pytest.mark.quick("model")
@pytest.mark.parametrize("kind", KINDS)
def test_same_rounds_greedy(kind: str) -> None:
    expected = by_the_book(kind, Rule.TOKEN, 3, SamplingParams(), 0, 20)
    assert by_the_engine(kind, Rule.TOKEN, 3, SamplingParams(), 0, 20) == expected


def test_control_another_seed_is_another_text() -> None:
    assert by_the_engine("model", Rule.TOKEN, 3, PLAIN, 1, 16) != by_the_book("model", Rule.TOKEN, 3, PLAIN, 2, 16)
