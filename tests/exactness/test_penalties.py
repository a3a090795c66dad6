"""Penalties, bias, minimum lengths and processors along the draft: as in plain decoding, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.sampling import PROMPT, RULES, Loop, padded, verdict
from exactness.warps import Definition
from forerun.config import SamplingParams
from forerun.types import Rule
from support.markov import joint_law, softmax_at, toy_pair

NUMBER = 1_000  # at which every control below is nine times over the limit
P = len(PROMPT)

CASES: dict[str, tuple[dict[str, Any], Definition]] = {
    "repetition": ({"repetition_penalty": 2.5}, Definition(1, repetition=2.5)),
    "presence": ({"presence_penalty": 2.0}, Definition(1, presence=2.0)),
    "frequency": ({"frequency_penalty": 1.5}, Definition(1, frequency=1.5)),
    "bias": ({"logit_bias": {0: 1.0, 2: -1.5}}, Definition(1, bias={0: 1.0, 2: -1.5})),
    "all": (
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {1: 0.8},
         "top_k": 2, "temperature": 0.8},
        Definition(1, repetition=1.3, presence=0.5, frequency=0.7, bias={1: 0.8}, top_k=2, temperature=0.8),
    ),
}  # fmt: skip
START = (1,)  # one token of prompt, so that repetition has something left to learn


def law(definition: Definition) -> Tensor:
    return joint_law(toy_pair(3)[0], START, 4, definition)


def sampled(case: str, rule: Rule = Rule.TOKEN, drafter: str = "model") -> list[tuple[int, ...]]:
    params = SamplingParams(**{"temperature": 1.0, **CASES[case][0]})
    return Loop(drafter, "3", rule).sample(NUMBER, prompt=START, params=params, max_new_tokens=5)


@pytest.mark.quick("presence")
@pytest.mark.parametrize("case", CASES)
def test_penalties_follow_the_draft(case: str) -> None:
    assert not verdict(sampled(case), law(CASES[case][1]))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter"), [(Rule.BLOCK, "model"), (Rule.COUPLED, "exit"), (Rule.TOKEN, "ngram")])
def test_all_penalties_at_once(rule: Rule, drafter: str) -> None:
    assert not verdict(sampled("all", rule, drafter), law(CASES["all"][1]))


@pytest.mark.quick("presence")
@pytest.mark.parametrize("case", ["repetition", "presence", "frequency", "all"])
def test_control_relaxed_penalties_are_noticed(case: str, monkeypatch: MonkeyPatch) -> None:
    controls.relaxed_penalties(monkeypatch)
    assert verdict(sampled(case), law(CASES[case][1]))


@pytest.mark.slow
def test_control_no_bias_is_noticed() -> None:
    assert verdict(sampled("bias"), law(Definition(1)))


END = 2
ENDING = {"stop_ids": frozenset({END}), "max_new_tokens": 4}


def ended(rule: Rule, at_least: int) -> list[list[int]]:
    samples = Loop("model", "3", rule).sample(NUMBER, min_new_tokens=at_least, **ENDING)
    assert all(END not in sample[:-1] for sample in samples), "something follows the end"
    assert all(len(sample) == 4 or sample[-1] == END for sample in samples)
    return padded(samples, 4, END)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at_least", [0, 3])
def test_end_token(rule: Rule, at_least: int) -> None:
    """Tokens and length together: a stop is an absorbing state."""
    wanted = joint_law(toy_pair(3)[0], PROMPT, 4, Definition(P, end=END, at_least=at_least))
    assert not verdict(ended(rule, at_least), wanted)


@pytest.mark.slow
def test_control_another_minimum_is_noticed() -> None:
    wanted = joint_law(toy_pair(3)[0], PROMPT, 4, Definition(P, end=END, at_least=3))
    assert verdict(ended(Rule.TOKEN, 2), wanted)


class Parity:
    """A processor that depends on the history: after an odd sum token 0 is favoured, after an even one token 1."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (ids.sum(-1) + 1) % 2
        return scores + 1.5 * torch.nn.functional.one_hot(favoured, scores.shape[-1]).to(scores.dtype)


def parity_law() -> Tensor:
    return joint_law(toy_pair(3)[0], PROMPT, 4, lambda logits, ids: Parity()(ids, logits).softmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_processor(rule: Rule) -> None:
    samples = Loop("model", "3", rule).sample(NUMBER, processors=(Parity(),), max_new_tokens=5)
    assert not verdict(samples, parity_law())
    assert verdict(samples, joint_law(toy_pair(3)[0], PROMPT, 4, softmax_at())), "the processor made no difference"


@pytest.mark.slow
def test_control_relaxed_processor_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.relaxed_penalties(monkeypatch)
    assert verdict(Loop("model", "3").sample(NUMBER, processors=(Parity(),), max_new_tokens=5), parity_law())
