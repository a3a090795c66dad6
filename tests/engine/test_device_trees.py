"""Trees grown, scored and verified by recorded rounds: the joint law of what is said, and what breaks it.

That they say the same tokens as rounds step by step is tested with the other drafters, quickly.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from exactness.sampling import PLAIN, verdict
from exactness.warps import Definition
from forerun import ops
from forerun.config import Kernels, SamplingParams
from forerun.drafters import DraftModel, FeatureHead, Tree
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.device.choose import runner_of
from forerun.engine.device.tree_round import TreeRound
from forerun.math import siblings
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.finish import finished
from support.heads import head_of
from support.markov import joint_law, toy_pair

COPIES, VOCAB, DEPTH = 768, 3, 2
STEPS = 4  # one more than a round can say: the keys that a kept path leaves are read again
PROMPT = (1, 2, 0, 1, 2)


def misfit(name: str, way: str, options: SamplingParams = PLAIN, definition: Definition | None = None) -> str:
    target, draft = (copy.deepcopy(model) for model in toy_pair(VOCAB))
    inner: Drafter = DraftModel(draft) if name == "model" else FeatureHead(head_of(target, noise=0.1))
    scorer = Scorer(target, use=Kernels.OFF)
    made = Engine(scorer, Tree(inner, nodes=5, width=2, siblings=way), Constant(DEPTH))
    made.pair.runner = runner_of(scorer, made.drafter, Rule.TOKEN, made.clock)
    assert made.runner.whole_rounds
    prompt = PROMPT if definition is None else PROMPT[: definition.prompt]
    for i in range(COPIES):
        made.add(Request(prompt=prompt, max_new_tokens=STEPS, params=options, seed=1, request_id=i))
    found = finished(made)
    assert made.runner._rounds, "the device had these rounds"
    return verdict([result.tokens for result in found], joint_law(toy_pair(VOCAB)[0], prompt, STEPS, definition))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("model", "sampled"), ("model", "top"), ("head", "sampled")])
def test_joint_law(name: str, way: str) -> None:
    assert not misfit(name, way)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {1: 0.8}}
ALL = SamplingParams(temperature=1.0, **PENALTIES)
LAW = Definition(1, repetition=1.3, presence=0.5, frequency=0.7, bias={1: 0.8})  # of one token of prompt


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("model", "sampled"), ("model", "top"), ("head", "sampled")])
def test_joint_law_with_penalties(name: str, way: str) -> None:
    assert not misfit(name, way, ALL, LAW)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sampled", "top"])
def test_control_nodes_that_do_not_look_up_their_paths(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.adjust_rows

    def blind(*given: Any, seen: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        return right(*given, seen=None if seen is None else torch.zeros_like(seen), **more)

    monkeypatch.setattr(ops, "adjust_rows", blind)
    assert misfit("model", way, ALL, LAW)


@pytest.mark.slow
def test_control_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "residual", lambda p, q: p)
    assert misfit("model", "sampled")


@pytest.mark.slow
def test_control_keys_stay_where_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeRound, "_move_keys", lambda *given: None)
    assert misfit("model", "top")
