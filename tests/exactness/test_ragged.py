"""Rows of different prompts, parameters and seeds in one batch: each has the law it would have alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.sampling import RULES, Loop, loop_on, verdict
from exactness.warps import Definition
from forerun.config import SamplingParams
from forerun.engine import Request
from forerun.types import LawParams, Rule
from support.devices import each_device
from support.markov import joint_law, toy_pair

NUMBER = 800  # of each kind
FEWER = 250  # where the quick part looks

# prompt, seed, parameters as the library takes them, and as this folder defines them
KINDS: list[tuple[tuple[int, ...], int, dict[str, Any], dict[str, Any]]] = [
    ((1,), 3, {"temperature": 1.0}, {}),
    ((2, 0, 1, 1, 0, 2, 2, 1, 0, 0), 4, {"temperature": 0.7, "top_k": 2}, {"temperature": 0.7, "top_k": 2}),
    ((0, 1), 3, {"temperature": 0.0}, {"temperature": 0.0}),
    ((0, 2, 1), 5, {"temperature": 1.3, "presence_penalty": 1.0}, {"temperature": 1.3, "presence": 1.0}),
]


def requests(number: int = NUMBER) -> list[Request]:
    """Kinds in turn, so that every batch holds all of them; budgets differ, so that rows leave at different times."""
    return [
        Request(
            prompt=prompt,
            max_new_tokens=4 + kind,
            params=SamplingParams(**given),
            seed=seed,
            request_id=len(KINDS) * i + kind,
        )
        for i in range(number)
        for kind, (prompt, seed, given, _) in enumerate(KINDS)
    ]


def law(kind: int) -> Tensor:
    prompt, _, _, settings = KINDS[kind]
    return joint_law(toy_pair(3)[0], prompt, 3, Definition(len(prompt), **settings))


def verdicts(rule: Rule, drafter: str, policy: str, device: str = "cpu", number: int = NUMBER) -> list[str]:
    loop = Loop(drafter, policy, rule) if device == "cpu" else loop_on(device, drafter, policy, rule)
    results = loop.run(requests(number))
    tokens = [result.tokens for result in results]
    return [verdict(tokens[kind :: len(KINDS)], law(kind)) for kind in range(len(KINDS))]


def test_every_row_has_its_own_law_briefly() -> None:
    assert verdicts(Rule.BLOCK, "chain", "hf", number=FEWER) == [""] * len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "policy"), list(zip(RULES, ("bass", "hf", "auto"), strict=True)))
@pytest.mark.parametrize("drafter", ["model", "chain"])
@each_device
def test_every_row_has_its_own_law(rule: Rule, policy: str, drafter: str, device: str) -> None:
    assert verdicts(rule, drafter, policy, device) == [""] * len(KINDS)


@pytest.mark.quick("cpu")
@each_device
def test_control_neighbours_parameters_are_noticed(monkeypatch: MonkeyPatch, device: str) -> None:
    """Parameters handed to the wrong row, by one. On a GPU first rounds have no draft, and fewer samples say less."""

    right = LawParams.stack
    monkeypatch.setattr(LawParams, "stack", lambda params: right([*params[1:], params[0]]))
    assert all(verdicts(Rule.TOKEN, "model", "3", device, FEWER if device == "cpu" else NUMBER))


@pytest.mark.slow
def test_control_wrong_correction_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    found = verdicts(Rule.TOKEN, "model", "3")
    assert found[0] and found[1] and not found[2], "greedy rows are right all the same"


@pytest.mark.slow
def test_rows_join_late() -> None:
    """Requests that come while others are half way, and leave holes behind."""
    loop = Loop("model", "3")
    waiting = [replace(r, request_id=r.request_id + 10**6) for r in requests()]
    results = []
    while waiting or not loop.engine.is_idle:
        for request in waiting[:60]:
            loop.engine.add(request)
        del waiting[:60]
        loop.engine.step()
        results += loop.engine.take_results()
    for kind in range(len(KINDS)):
        mine = [r.tokens for r in results if r.request.request_id % len(KINDS) == kind]
        assert len(mine) == NUMBER
        assert not verdict(mine, law(kind))
