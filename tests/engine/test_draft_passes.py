"""Drafts of rounds that go step by step are drawn from recorded passes, and are the same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.device_engines import Rehearsing, engine, requests, texts
from forerun.config import SamplingParams
from forerun.engine import Engine
from forerun.engine.device.choose import draft_passes_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.errors import ForerunWarning

PENALISED = SamplingParams(temperature=1.0, repetition_penalty=1.3)


def lending(**how: Any) -> Engine:
    made = engine(True, **how)
    passes = made.drafting.passes = draft_passes_of(made.drafter, made.target, made.clock)
    assert passes is not None
    passes.runner.recorder = passes.runner.recordings.recorder = Rehearsing(made.target.device)
    return made


def passes_of(made: Engine) -> DraftPasses:
    assert made.drafting.passes is not None
    return made.drafting.passes


@pytest.mark.parametrize("drafter", ("model", "doubting"))
def test_the_same_is_said(drafter: str) -> None:
    """Rows of different lengths, some of which end before others; penalties keep them on the ground."""
    made = lending(drafter=drafter)
    got = texts(made, requests(5, PENALISED))
    assert got == texts(engine(False, drafter=drafter), requests(5, PENALISED))
    assert passes_of(made).runner.recorder.num_recordings > 0
    assert made.drafter.score_last is None, "lent, not given"


def test_rounds_of_both_kinds_take_turns() -> None:
    """Penalised rows end first; the others then fly, with the same draft model and its cache."""
    asked = [replace(r, params=PENALISED, max_new_tokens=7) if i < 2 else r for i, r in enumerate(requests(4))]
    made = lending()
    assert texts(made, asked) == texts(engine(False), asked)
    assert made.runner is not None and made.runner._rounds


def test_control_logits_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DraftPasses._score_last

    def turned(self: DraftPasses, *given: Any) -> Any:
        return right(self, *given).roll(1, 0)

    want = texts(engine(False), requests(5, PENALISED))
    monkeypatch.setattr(DraftPasses, "_score_last", turned)
    made = lending()
    got = texts(made, requests(5, PENALISED))
    assert got != want, "other drafts are met by other random numbers"


def test_a_recording_that_fails_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lending()

    def fails(rows: Sequence[Any], blocks: Sequence[Any]) -> Any:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(passes_of(made).runner, "score", fails)
    with pytest.warns(ForerunWarning, match="no graph today"):
        got = texts(made, requests(3, PENALISED))
    assert got == texts(engine(False), requests(3, PENALISED))
    assert passes_of(made).runner.is_disabled


def test_whom_nothing_is_lent() -> None:
    for drafter in ("none", "lookup"):
        made = engine(True, drafter=drafter)
        assert draft_passes_of(made.drafter, made.target, made.clock) is None
