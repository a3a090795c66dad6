"""The joint law of the first tokens, for every rule with every drafter and every policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.controls import Misreporting, NextRow
from exactness.sampling import DRAFTERS, POLICIES, PROMPT, RULES, Loop, draft_model, verdict
from forerun.math.random import RandomStream
from forerun.policy import Constant
from forerun.types import Rule
from support.markov import joint_law, softmax_at, toy_pair

NUMBER = 12_000  # tells a temperature of 1.1 from 1
FEWER = 4_000  # for faults: what so few samples show, more of them show all the more
FEWEST = 1_200  # where the quick part looks at the law and at its faults
STEPS = {3: 4, 5: 3}

# Every drafter and every policy meets every rule; which policy drives which drafter differs from rule to rule.
COVERING = [
    (rule, drafter, list(POLICIES)[(i + j) % len(POLICIES)])
    for i, rule in enumerate(RULES)
    for j, drafter in enumerate(DRAFTERS)
]


@lru_cache
def law(vocab: int) -> Tensor:
    return joint_law(toy_pair(vocab)[0], PROMPT, STEPS[vocab])


def test_three_tokens_briefly() -> None:
    assert not verdict(Loop("model", "3", Rule.TOKEN).sample(FEWEST), law(3))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter", "policy"), COVERING)
def test_three_tokens(rule: Rule, drafter: str, policy: str) -> None:
    loop = Loop(drafter, policy, rule)
    assert not verdict(loop.sample(NUMBER), law(3))
    if not policy.isdigit():
        assert len(loop.watched.asked) >= 3, f"the policy only ever asked for {loop.watched.asked}"
    elif rule is not Rule.COUPLED:
        assert max(loop.watched.asked) == int(policy)


@pytest.mark.slow  # what three tokens already say, said once more where rows outlast several rounds
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["model", "chain"])
def test_five_tokens(rule: Rule, drafter: str) -> None:
    assert not verdict(Loop(drafter, "3", rule, vocab=5).sample(NUMBER), law(5))


@pytest.mark.slow
def test_plain_decoding() -> None:
    assert not verdict(Loop("model", Constant(0)).sample(NUMBER, max_new_tokens=4), law(3))


FAULTS: list[Any] = [
    (Rule.TOKEN, controls.correct_from_target),
    (Rule.BLOCK, controls.correct_from_target),
    (Rule.TOKEN, controls.bonus_from_row_before),
    (Rule.BLOCK, controls.bonus_from_row_before),
    (Rule.TOKEN, controls.no_bonus_keeps_draft),
    (Rule.TOKEN, controls.one_round),
    (Rule.BLOCK, controls.one_round),
    (Rule.COUPLED, controls.one_position),
    (Rule.TOKEN, lambda patch: controls.shared_noise(patch, RandomStream.ACCEPT)),
    (Rule.TOKEN, lambda patch: controls.shared_noise(patch, RandomStream.FINAL)),
    (Rule.BLOCK, lambda patch: controls.shared_noise(patch, RandomStream.ACCEPT)),
]


def test_control_a_fault_is_noticed_briefly(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert verdict(Loop("model", "3", Rule.TOKEN).sample(FEWEST), law(3))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fault"), FAULTS)
def test_control_faults_are_noticed(rule: Rule, fault: Callable[[MonkeyPatch], None], monkeypatch: MonkeyPatch) -> None:
    fault(monkeypatch)
    assert verdict(Loop("model", "3", rule).sample(FEWER), law(3))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_control_shifted_rows_are_noticed(rule: Rule) -> None:
    drafter = Misreporting(draft_model(toy_pair(3)[1]), lambda draft, context: NextRow(draft.law, draft.width))
    assert verdict(Loop(drafter, "3", rule).sample(FEWER), law(3))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "ngram", "exit"])
def test_control_other_law_is_noticed(drafter: str) -> None:
    """The same samples against the law of a slightly different temperature: how small a difference is seen."""
    other = joint_law(toy_pair(3)[0], PROMPT, 4, softmax_at(1.1))
    assert verdict(Loop(drafter, "3").sample(NUMBER), other)
