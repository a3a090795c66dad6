"""Drafters made of the target's own parts draft inside recorded rounds, and say there what they say step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.device_engines import CUT, GREEDY, SAMPLED, Texts, engine, finish, flown, rehearsing, requests, texts
from engine.following import Follows, Replayed
from forerun.config import SamplingParams
from forerun.drafters.features import Features
from forerun.engine import Engine
from forerun.engine.device.choose import describe
from forerun.policy import Constant
from forerun.types import Rule
from support.tiny import plain_greedy, tiny_model

CHAINS = ("exit", "feature", "few words", "parallel", "table", "chain of a table", "table before a model")
TREES = ("tree", "top tree", "small tree", "tree of exit", "tree of feature", "tree of parallel")
DRAFTERS = (*CHAINS, *TREES)
MIXED = [SAMPLED, GREEDY, CUT, replace(SAMPLED, min_p=0.05), CUT]
CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "block": {"rule": Rule.BLOCK},
    "long drafts": {"policy": 9},
    "one token": {"policy": 1},
    "family": {"family": "qwen3"},
    "learned positions": {"family": "gpt2"},
    "not ahead": {"ahead": False},
}


@pytest.mark.parametrize(("case", "drafter"), [(c, d) for c in CASES for d in DRAFTERS if c != "block" or d in CHAINS])
@pytest.mark.quick("block-few words")
def test_same_tokens_as_step_by_step(case: str, drafter: str) -> None:
    settings = {"drafter": drafter, **CASES[case]}
    made = engine(True, **settings)
    rounds = flown(made)
    assert texts(made, requests(3)) == texts(engine(False, **settings), requests(3))
    assert len(rounds) > 3 and max(rounds) == 3


@pytest.mark.slow
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drafter", ["fewer ids", "chain of fewer ids", "tree of fewer ids"])
def test_a_draft_with_less_padding_drafts_on_the_device_as_on_the_host(drafter: str, params: SamplingParams) -> None:
    """Whether or not prompts and texts hold ids that it lacks."""
    made = engine(True, drafter=drafter)
    rounds = flown(made)
    found = texts(made, requests(3, params))
    assert found == texts(engine(False, drafter=drafter), requests(3, params))
    assert any(token >= 80 for text in found.values() for token in text), "else nothing is seen here"
    assert len(rounds) > 3 and max(rounds) == 3
    assert made.runner is not None and describe(made.runner, made.target, made.drafter, made.rule) == "whole rounds"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_parameters_of_all_kinds_in_one_batch(drafter: str) -> None:
    got = texts(rehearsing(engine(True, drafter=drafter)), requests(5, MIXED))
    assert got == texts(engine(False, drafter=drafter), requests(5, MIXED))


@pytest.mark.quick("tree of feature")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_that_of_generate(drafter: str) -> None:
    got = texts(engine(True, drafter=drafter), requests(3, GREEDY))
    for request in requests(3, GREEDY):
        wanted = plain_greedy(tiny_model("llama"), list(request.prompt), request.max_new_tokens)
        assert list(got[request.request_id]) == wanted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.slow
def test_lengths_that_change_while_rounds_run_ahead(drafter: str, params: SamplingParams) -> None:
    """Rounds without a draft, longer ones behind shorter ones: what a drafter missed is read up in time."""
    policy = Follows()
    got = texts(engine(True, drafter=drafter, policy=policy), requests(3, params, new=40))
    replayed = engine(False, drafter=drafter, policy=Replayed(policy.drafted))
    assert got == texts(replayed, requests(3, params, new=40))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.slow
def test_rounds_of_both_kinds_take_turns(drafter: str) -> None:
    """A row with a processor of its own sends everybody step by step for a while."""

    def found(on_device: bool) -> Texts:
        made, asked = engine(on_device, drafter=drafter), requests(4, new=30)
        made.add(asked[0])
        made.step()
        made.step()
        made.add(replace(asked[1], params=replace(SAMPLED, presence_penalty=0.5), max_new_tokens=9))
        made.add(asked[2])
        for _ in range(6):
            made.step()
        made.add(asked[3])
        return finish(made)

    assert found(True) == found(False)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.slow
def test_rows_that_end_and_begin(drafter: str) -> None:
    def found(on_device: bool) -> Texts:
        made, asked = engine(on_device, drafter=drafter, keep_rows=1), requests(6, new=9)
        got: Texts = {}
        for request in asked:
            made.add(request)
            made.step()
        got |= finish(made)
        return got

    assert found(True) == found(False)


@pytest.mark.quick("tree of feature")
@pytest.mark.parametrize("drafter", ["feature", "parallel", "tree of feature"])
def test_a_head_that_has_heard_more_rows_than_it_has_drafted_for(drafter: str) -> None:
    """Its features' memory has grown before its own was first used; entries without a row write to both alike."""

    def found(on_device: bool) -> Texts:
        policy, asked = Constant(0), requests(8, GREEDY, new=6)
        made = engine(on_device, drafter=drafter, policy=policy)
        for request in asked[:6]:
            made.add(request)
        made.step()
        for request in asked[6:]:
            made.add(request)
        for _ in range(9):  # after which three of eight have ended: the others' table has entries without a row
            made.step()
        policy.n = 2
        return finish(made)

    assert found(True) == found(False)


@pytest.mark.quick("parallel")
@pytest.mark.parametrize("drafter", ["feature", "parallel"])
def test_control_features_that_nobody_writes_down(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from other features are other drafts, met by the same random numbers: the comparisons above can fail."""
    want = texts(engine(False, drafter=drafter), requests(3))
    monkeypatch.setattr(Features, "write_at", lambda *given: None)
    assert texts(engine(True, drafter=drafter), requests(3)) != want


@pytest.mark.slow
def test_somebody_else_who_listens_is_told_by_rounds_step_by_step() -> None:
    made = engine(True, drafter="feature")
    made.target.observers.append(Features())
    rounds = flown(made)
    assert texts(made, requests(3)) == texts(engine(False, drafter="feature"), requests(3))
    assert not rounds


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_says_that_it_is_recorded(drafter: str) -> None:
    made: Engine = engine(True, drafter=drafter)
    assert made.runner is not None and made.runner.whole_rounds
    assert describe(made.runner, made.target, made.drafter, Rule.TOKEN) == "whole rounds"
