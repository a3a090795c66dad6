"""A sampled call that names a seed gives the same text every time under the defaults, whatever the clock says."""

from __future__ import annotations

from typing import Any

import pytest

import forerun
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.policy import OwnAcceptance
from support.batches import padded
from support.clocks import ErraticClock
from support.tiny import draft_of, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(3, 97, seed=81)
SETTINGS: Any = {"max_new_tokens": 24, "temperature": 1.0, "seed": 7}


def decoder(clock: int, **settings: Any) -> forerun.SpeculativeDecoder:
    model = tiny_model("llama")
    made = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), **settings)
    made.engine.clock = ErraticClock(clock)
    return made


def texts(clocks: range, **settings: Any) -> set[str]:
    return {str(decoder(clock, **settings).generate(*padded(PROMPTS), **SETTINGS).new_tokens) for clock in clocks}


def test_the_same_call_gives_the_same_text_whatever_the_clock_says() -> None:
    assert len(texts(range(4))) == 1


def test_control_measured_lengths_give_another_text_under_another_clock() -> None:
    assert len(texts(range(4), policy=forerun.CostModel())) > 1


@pytest.mark.slow
def test_neither_calls_before_nor_neighbours_matter() -> None:
    """What the policy learns in other calls stays in those, and a row's lengths are its own."""
    ours = decoder(0)
    first = ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens
    ours.generate(*padded(PROMPTS), max_new_tokens=40, temperature=1.0)
    assert ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens == first
    alone = [ours.generate(*padded([p]), request_ids=[i], **SETTINGS).new_tokens[0] for i, p in enumerate(PROMPTS)]
    assert alone == first


def policies_of(ours: forerun.SpeculativeDecoder, **keywords: Any) -> set[type]:
    return {type(ours.engine.policy) for _ in ours.stream(*padded(PROMPTS), max_new_tokens=6, **keywords)}


def test_who_names_no_seed_or_is_greedy_keeps_measured_lengths() -> None:
    ours = decoder(0)
    auto = type(ours.policy)
    assert policies_of(ours, temperature=1.0) <= {auto}
    assert policies_of(ours, seed=3) <= {auto}
    assert OwnAcceptance in policies_of(ours, seed=3, temperature=1.0)
    assert ours.engine.policy is ours.policy, "a call's own policy stayed behind"


@pytest.mark.parametrize("policy", (2, forerun.CostModel()), ids=("constant", "measured"))
def test_a_policy_that_was_given_stands(policy: Any) -> None:
    ours = decoder(0, policy=policy)
    assert policies_of(ours, seed=3, temperature=1.0) == {type(ours.policy)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ("hf", "bass"))
def test_rules_that_remember_earlier_calls_begin_anew(policy: str) -> None:
    ours = decoder(0, policy=policy)
    first = ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens
    assert ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens == first
    for _ in range(2):  # where nobody names a seed they go on from where they were
        ours.generate(*padded(PROMPTS), max_new_tokens=40)
    assert getattr(ours.policy, "_opening", None) != 5 and getattr(ours.policy, "length", None) != 7
    assert ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens == first


class Unsure(forerun.Constant):
    """Cannot say what it does in calls that name a seed."""

    def __init__(self, answer: Any) -> None:
        super().__init__(2)
        self.answer = answer

    def for_seed(self) -> Any:
        return self.answer()


@pytest.mark.quick("raises")
@pytest.mark.parametrize("answer", (lambda: 1 // 0, lambda: "longer"), ids=("raises", "no policy"))
def test_a_policy_that_cannot_say_its_own_for_a_seed_costs_a_warning(answer: Any) -> None:
    ours, expected = decoder(0, policy=Unsure(answer)), decoder(0, policy=2)
    with pytest.warns(ForerunWarning, match="Unsure failed"):
        first = ours.generate(*padded(PROMPTS), **SETTINGS).new_tokens
    assert first == expected.generate(*padded(PROMPTS), **SETTINGS).new_tokens
    strict = decoder(0, policy=Unsure(answer), strict=True)
    with pytest.raises((ZeroDivisionError, InvalidArgument)):
        strict.generate(*padded(PROMPTS), **SETTINGS)
    greedy = strict.generate(*padded(PROMPTS), max_new_tokens=4)
    assert len(greedy.new_tokens) == len(PROMPTS), "the call that failed was left under way"
