"""Drafts of rounds that go step by step are drawn from recorded passes, and are the same drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.device_engines import InPython, Rehearsing, engine, requests, texts
from forerun.engine import Engine, Request
from forerun.engine.device.choose import draft_passes_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.errors import ForerunWarning


def processed(number: int) -> list[Request]:
    """Rows with a processor, which is why their rounds go step by step."""
    return [replace(request, processors=(InPython(),)) for request in requests(number)]


def lending(**how: Any) -> Engine:
    made = engine(True, **how)
    passes = made.drafting.passes = draft_passes_of(made.drafter, made.target, made.clock)
    assert passes is not None
    passes.runner.recorder = passes.runner.recordings.recorder = Rehearsing(made.target.device)
    return made


def passes_of(made: Engine) -> DraftPasses:
    assert made.drafting.passes is not None
    return made.drafting.passes


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("drafter", ("model", "doubting"))
def test_the_same_is_said(drafter: str) -> None:
    """Rows of different lengths, some of which end before others; processors keep them on the host."""
    made = lending(drafter=drafter)
    got = texts(made, processed(5))
    assert got == texts(engine(False, drafter=drafter), processed(5))
    assert passes_of(made).runner.recorder.num_recordings > 0
    assert made.drafter.score_last is None, "lent, not given"


def test_rounds_of_both_kinds_take_turns() -> None:
    """Rows with a processor end first; the others are recorded, with the same draft model and its cache."""
    asked = [*(replace(request, max_new_tokens=7) for request in processed(2)), *requests(4)[2:]]
    made = lending()
    assert texts(made, asked) == texts(engine(False), asked)
    assert made.runner is not None and made.runner._rounds


def test_control_logits_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DraftPasses._score_last

    def turned(self: DraftPasses, *given: Any) -> Any:
        return right(self, *given).roll(1, 0)

    want = texts(engine(False), processed(5))
    monkeypatch.setattr(DraftPasses, "_score_last", turned)
    made = lending()
    got = texts(made, processed(5))
    assert got != want, "other drafts are met by other random numbers"


def test_a_recording_that_fails_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lending()

    def fails(rows: Sequence[Any], blocks: Sequence[Any]) -> Any:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(passes_of(made).runner, "score", fails)
    with pytest.warns(ForerunWarning, match="no graph today"):
        got = texts(made, processed(5))
    assert got == texts(engine(False), processed(5))
    assert passes_of(made).runner.is_disabled


def test_whom_nothing_is_lent() -> None:
    for drafter in ("none", "lookup"):
        made = engine(True, drafter=drafter)
        assert draft_passes_of(made.drafter, made.target, made.clock) is None
