"""Rows that may not say some ids fly like others, and say what they would have said step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
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

NEVER = list(range(0, 97, 2))  # half of the vocabulary: nearly every round meets one
FIRST = list(range(0, 97, 3))
Processors = Callable[[int], Sequence[Any]]  # of a row with a prompt of so many tokens


def both(prompt: int) -> list[Any]:
    return [SuppressTokensLogitsProcessor(NEVER), SuppressTokensAtBeginLogitsProcessor(FIRST, prompt)]


def forced(prompt: int) -> list[Any]:
    ends = ForcedBOSTokenLogitsProcessor(8), ForcedEOSTokenLogitsProcessor(prompt + 17, 5)
    return [*ends, NoBadWordsLogitsProcessor([[4], [6]])]


def asked(processors: Processors, params: SamplingParams = SAMPLED, number: int = 3) -> list[Request]:
    made = [replace(request, max_new_tokens=17) for request in requests(number, params)]
    made[0] = replace(made[0], prompt=made[0].prompt[:1])
    return [replace(request, processors=tuple(processors(len(request.prompt)))) for request in made]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("params", (SAMPLED, GREEDY))
@pytest.mark.parametrize("processors", (both, forced))
def test_the_same_is_said(processors: Processors, params: SamplingParams) -> None:
    made = engine(True)
    sent = flown(made)
    got = texts(made, asked(processors, params))
    assert got == texts(engine(False), asked(processors, params))
    assert len(sent) >= 3 and made.runner is not None and not made.runner.is_disabled
    if processors is forced:
        assert all(row[-1] == 5 for row in got.values()) and got[0][0] == 8, "behind a prompt of one token"
    else:
        assert all(token % 2 for row in got.values() for token in row)
        assert all(row[0] % 3 for row in got.values()) and not all(t % 3 for row in got.values() for t in row)


def test_all_rounds_are_sent_off_from_the_first_on(monkeypatch: MonkeyPatch) -> None:
    made = engine(True)
    monkeypatch.setattr("forerun.engine.rounds.run_on_host", lambda *_, **__: pytest.fail("a round went step by step"))
    texts(made, asked(both))


def test_rows_that_differ_are_sent_off_together() -> None:
    mixed = [*asked(both, number=2), *asked(lambda prompt: [], number=3)[2:]]
    made = engine(True)
    sent = flown(made)
    assert texts(made, mixed) == texts(engine(False), mixed)
    assert max(sent) == 3


class TestReading:
    def bans(self, *processors: Any, **more: Any) -> Bans | None:
        return bans_of(Request(prompt=(1, 2, 3), max_new_tokens=9, processors=processors, **more))

    def test_known_ones(self) -> None:
        assert self.bans() == Bans()
        assert self.bans(*both(3)) == Bans(tuple(NEVER), tuple(FIRST))
        assert self.bans(SuppressTokensAtBeginLogitsProcessor([7], 4)) == Bans(since=2)
        assert self.bans(ForcedBOSTokenLogitsProcessor(7)) == Bans(), "which is for prompts of one token"
        assert self.bans(ForcedEOSTokenLogitsProcessor(12, 2)) == Bans(until=8)
        assert self.bans(NoBadWordsLogitsProcessor([[4], [2]], 2)) == Bans(never=(4,))

    def test_a_forced_first_token_is_left_to_the_host(self) -> None:
        asked = Request(prompt=(1,), max_new_tokens=9, processors=(ForcedBOSTokenLogitsProcessor(7),))
        assert bans_of(asked) == Bans(since=1)

    def test_what_is_more_than_a_ban(self) -> None:
        class Derived(SuppressTokensLogitsProcessor):
            pass

        assert self.bans(NoBadWordsLogitsProcessor([[4, 5]])) is None
        assert self.bans(Derived([4])) is None
        assert self.bans(TemperatureLogitsWarper(2.0)) is None
        assert self.bans(biases=(SuppressTokensLogitsProcessor([4]),)) is None

    def test_penalties_are_no_processors(self) -> None:
        assert self.bans(params=SamplingParams(temperature=1.0, repetition_penalty=1.2), min_new_tokens=2) == Bans()
