"""Rows that may not say some ids fly like others, and say what they would have said step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from engine.device_engines import GREEDY, SAMPLED, engine, flown, requests, texts
from forerun.config import SamplingParams
from forerun.engine import Request
from forerun.engine.bans import Bans, bans_of
from forerun.engine.device.round import DeviceRound
from forerun.engine.device.row_table import RowTable

NEVER = list(range(0, 97, 2))  # half of the vocabulary: nearly every round meets one
FIRST = list(range(0, 97, 3))
Processors = Callable[[int], Sequence[Any]]  # of a row with a prompt of so many tokens


def both(prompt: int) -> list[Any]:
    return [SuppressTokensLogitsProcessor(NEVER), SuppressTokensAtBeginLogitsProcessor(FIRST, prompt)]


def forced(prompt: int) -> list[Any]:
    return [ForcedEOSTokenLogitsProcessor(prompt + 17, 5), NoBadWordsLogitsProcessor([[4], [6]])]


def asked(processors: Processors, params: SamplingParams = SAMPLED, number: int = 3) -> list[Request]:
    made = [replace(request, max_new_tokens=17) for request in requests(number, params)]
    made[0] = replace(made[0], prompt=made[0].prompt[:1])
    return [replace(request, processors=tuple(processors(len(request.prompt)))) for request in made]


@pytest.mark.parametrize("params", (SAMPLED, GREEDY))
@pytest.mark.parametrize("processors", (both, forced))
def test_the_same_is_said(processors: Processors, params: SamplingParams) -> None:
    made = engine(True)
    sent = flown(made)
    got = texts(made, asked(processors, params))
    assert got == texts(engine(False), asked(processors, params))
    assert len(sent) >= 3 and made.runner is not None and not made.runner.is_disabled
    if processors is forced:
        assert all(row[-1] == 5 for row in got.values())
    else:
        assert all(token % 2 for row in got.values() for token in row)
        assert all(row[0] % 3 for row in got.values()) and not all(t % 3 for row in got.values() for t in row)


def test_all_rounds_are_sent_off_from_the_first_on(monkeypatch: MonkeyPatch) -> None:
    made = engine(True)
    monkeypatch.setattr("forerun.engine.engine.run_on_host", lambda *_, **__: pytest.fail("a round went step by step"))
    texts(made, asked(both))


@pytest.mark.parametrize("what", ("never", "not_first"))
def test_control_nothing_is_forbidden(what: str, monkeypatch: MonkeyPatch) -> None:
    right = RowTable.assign

    def forgetful(self: RowTable, *given: Any) -> None:
        right(self, *given)
        self.bans = replace(self.bans, **{what: ()})

    want = texts(engine(False), asked(both))
    monkeypatch.setattr(RowTable, "assign", forgetful)
    assert texts(engine(True), asked(both)) != want


def test_a_draft_that_forgets_is_another_draft_and_no_other_law(monkeypatch: MonkeyPatch) -> None:
    """Greedy text does not depend on what is drafted; judging alone must forbid."""
    right = DeviceRound._forbid

    def verifying_alone(self: DeviceRound, logits: Any, first: Any, *ids: Any) -> None:
        if not ids:
            right(self, logits, first)

    want = texts(engine(False), asked(both, GREEDY))
    monkeypatch.setattr(DeviceRound, "_forbid", verifying_alone)
    assert texts(engine(True), asked(both, GREEDY)) == want


def test_rows_that_differ_are_not_sent_off_together() -> None:
    mixed = [*asked(both, number=2), *asked(lambda prompt: [], number=3)[2:]]
    made = engine(True)
    sent = flown(made)
    assert texts(made, mixed) == texts(engine(False), mixed)
    assert not sent or max(sent) < 3


def test_where_a_reduced_vocabulary_has_them() -> None:
    made = engine(True)
    texts(made, asked(both, number=1))
    assert made.runner is not None
    turn = next(iter(made.runner._rounds.values()))
    ids = torch.tensor([1, 4, 6, 7, 90])
    assert turn._banned((4, 7, 200), ids).tolist() == [1, 3]
    assert turn._banned((4, 7, 200), None).tolist() == [4, 7]


class TestReading:
    def bans(self, *processors: Any, **more: Any) -> Bans | None:
        return bans_of(Request(prompt=(1, 2, 3), max_new_tokens=9, processors=processors, **more))

    def test_known_ones(self) -> None:
        assert self.bans() == Bans()
        assert self.bans(*both(3)) == Bans(tuple(NEVER), tuple(FIRST))
        assert self.bans(SuppressTokensAtBeginLogitsProcessor([7], 4)) == Bans(since=2)
        assert self.bans(ForcedBOSTokenLogitsProcessor(7)) == Bans()
        assert self.bans(ForcedEOSTokenLogitsProcessor(12, 2)) == Bans(until=8)
        assert self.bans(NoBadWordsLogitsProcessor([[4], [2]], 2)) == Bans(never=(4,))

    def test_what_is_more_than_a_ban(self) -> None:
        class Derived(SuppressTokensLogitsProcessor):
            pass

        assert self.bans(NoBadWordsLogitsProcessor([[4, 5]])) is None
        assert self.bans(Derived([4])) is None
        assert self.bans(TemperatureLogitsWarper(2.0)) is None
        assert self.bans(min_new_tokens=2) is None
        assert self.bans(params=SamplingParams(temperature=1.0, repetition_penalty=1.2)) is None
