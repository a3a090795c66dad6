"""Temperature and truncation of the target, drafts that were truncated otherwise, budgets that cut drafts short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.controls import Misreporting
from exactness.sampling import PROMPT, RULES, Loop, draft_model, verdict
from exactness.warps import Definition
from forerun.config import SamplingParams
from forerun.drafters import DraftModel
from forerun.math import verify
from forerun.math.laws import LogitLaw
from forerun.policy import Constant
from forerun.types import Draft, DraftContext, LawParams, Rule
from support.markov import joint_law, toy_pair

NUMBER = 6_000
FEWER = 1_500  # where the quick part looks
P = len(PROMPT)
CASES: dict[str, dict[str, Any]] = {
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.35},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
}


def law(vocab: int = 5, **settings: Any) -> Tensor:
    return joint_law(toy_pair(vocab)[0], PROMPT, 3, Definition(P, **settings))


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **settings})


def check_target_law(case: str, number: int) -> None:
    rule = RULES[list(CASES).index(case) % 3]
    loop = Loop("model", "3", rule, vocab=5)
    samples = loop.sample(number, params=params(**CASES[case]), max_new_tokens=4)
    assert not verdict(samples, law(**CASES[case]))
    assert verdict(samples, law()), "the setting made no difference"


def test_target_law_briefly() -> None:
    check_target_law("all", FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_target_law(case: str) -> None:
    check_target_law(case, NUMBER)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["random", "ngram", "exit"])
def test_truncated_target_with_other_drafters(drafter: str) -> None:
    samples = Loop(drafter, "3", vocab=5).sample(NUMBER, params=params(top_k=2), max_new_tokens=4)
    assert not verdict(samples, law(top_k=2))


class OwnParams:
    """Drafts under sampling parameters of its own, and says so unless it is told to claim others."""

    def __init__(self, drafter: DraftModel, own: SamplingParams) -> None:
        self.drafter, self.own = drafter, own
        self.rewind, self.admit, self.release = drafter.rewind, drafter.admit, drafter.release

    def propose(self, context: DraftContext) -> Draft:
        return self.drafter.propose(replace(context, params=LawParams.stack([self.own] * len(context.rows))))


def claim(settings: SamplingParams) -> Any:
    """Reports the draft model's law under `settings`, whatever it drew with."""

    def report(draft: Draft, context: DraftContext) -> LogitLaw:
        true = draft.law
        assert isinstance(true, LogitLaw)
        return LogitLaw(true.logits, true._index, LawParams.stack([settings] * len(context.rows)), true.owner)

    return report


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("own", [{}, {"temperature": 2.0}, {"top_k": 1}, {"temperature": 0.0}])
def test_draft_truncated_otherwise(rule: Rule, own: dict[str, Any]) -> None:
    drafter = OwnParams(draft_model(toy_pair(3)[1]), params(**own))
    samples = Loop(drafter, "3", rule).sample(NUMBER // 2, params=params(top_k=2), max_new_tokens=4)
    assert not verdict(samples, law(3, top_k=2))


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_control_lying_drafter_is_noticed(rule: Rule) -> None:
    """Drawn from the two most likely tokens, reported as drawn from all."""
    drafter = Misreporting(OwnParams(draft_model(toy_pair(3)[1]), params(top_k=2)), claim(params()))
    assert verdict(Loop(drafter, "3", rule).sample(FEWER, max_new_tokens=4), law(3))


def check_budget(rule: Rule, number: int) -> None:
    loop = Loop("model", Constant(8), rule, vocab=5)
    samples = loop.sample(number, max_new_tokens=3)
    assert {len(sample) for sample in samples} == {3}
    assert max(loop.watched.asked) == 2, "the target always adds a token of its own"
    assert not verdict(samples, law())


@pytest.mark.slow
def test_a_budget_cuts_the_draft_briefly() -> None:
    check_budget(Rule.BLOCK, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_budget_cuts_the_draft(rule: Rule) -> None:
    check_budget(rule, NUMBER)


@pytest.mark.slow
def test_control_budget(monkeypatch: MonkeyPatch) -> None:
    controls.bonus_from_row_before(monkeypatch)
    assert verdict(Loop("model", "5", vocab=5).sample(NUMBER, max_new_tokens=3), law())


def forbidden_tokens_met(monkeypatch: MonkeyPatch) -> int:
    """Emitted tokens that the target forbids, with acceptance uniforms that are all exactly 0."""
    right = verify.noise_of
    monkeypatch.setattr(
        verify, "noise_of",
        lambda keys, width, rule: replace(right(keys, width, rule), accept=torch.zeros(len(keys.seed), width).double()),
    )  # fmt: skip
    samples = Loop("random", "3", vocab=5).sample(256, params=params(logit_bias={3: -float("inf")}), max_new_tokens=4)
    return sum(sample.count(3) for sample in samples)


def test_forbidden_token_with_uniform_zero(monkeypatch: MonkeyPatch) -> None:
    assert forbidden_tokens_met(monkeypatch) == 0


def test_control_accepting_with_equality_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.accept_impossible(monkeypatch)
    assert forbidden_tokens_met(monkeypatch) > 0
