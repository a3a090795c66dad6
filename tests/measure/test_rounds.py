"""Rounds and what is made of them: latencies by hand, percentiles of known rounds, a real call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.papers import chen
from forerun import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.engine import Seconds
from forerun.measure.rounds import PHASES, SKIP, Round, Trace, _round, decode
from forerun.policy import Constant
from support.tiny import draft_of, ragged_prompts, tiny_model


def trace(*rounds: tuple[float, dict[int, int]], rows: int = 1) -> Trace:
    made = tuple(Round(seconds, dict.fromkeys(PHASES, seconds / 4), gained) for seconds, gained in rounds)
    result: Any = SimpleNamespace(rows=[None] * rows)
    return Trace(made, result)


def test_latency_is_until_the_row_itself_is_done() -> None:
    found = trace((1.0, {0: 2, 1: 1}), (1.0, {0: 2, 1: 1}), (4.0, {1: 1}), rows=2)
    assert found.latencies() == [pytest.approx(2 / 4), pytest.approx(6 / 3)]
    assert (found.seconds, found.tokens, found.phase("draft")) == (6.0, 7, pytest.approx(0.5))


def test_a_row_that_ended_before_the_clock_has_no_latency() -> None:
    assert trace((1.0, {1: 2}), rows=2).latencies() == [0.5]


def test_equal_rounds_give_one_time() -> None:
    times = chen.resampled([trace(*[(0.5, {0: 2})] * 9)], draws=20)
    assert times == [pytest.approx(0.5 * chen.TOKENS / 2)] * 20


def test_prompts_stay_apart_when_rounds_are_drawn() -> None:
    """Half of the prompts take one second a token, half two: nothing lies between."""
    slow, fast = trace(*[(2.0, {0: 1})] * 5), trace(*[(1.0, {0: 1})] * 5)
    times = chen.resampled([slow, fast], draws=60)
    assert set(times) == {chen.TOKENS * 1.0, chen.TOKENS * 2.0}


def test_capturing_is_paid_once_a_shape_not_once_a_round() -> None:
    """Two seconds in all, of which one and a half went into recording a graph."""
    before, after = (0.0, Seconds()), (2.0, Seconds(capture=1.5))
    found = _round(before, after, {0: 1})
    assert (found.seconds, found.captured) == (0.5, 1.5)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("length", [0, 3])
def test_a_call_round_by_round(length: int) -> None:
    target = tiny_model("llama")
    drafter = DraftModel(draft_of(target))
    prompts = ragged_prompts(3, 97, seed=1)
    decoder = SpeculativeDecoder(target, drafter, policy=Constant(length))
    found = decode(decoder, prompts, max_new_tokens=20, temperature=1.0, seed=3)
    again = SpeculativeDecoder(target, DraftModel(draft_of(target)), policy=Constant(length))
    whole = decode(again, prompts, max_new_tokens=20, temperature=1.0, seed=3)
    assert found.result.new_tokens == whole.result.new_tokens
    assert [len(tokens) for tokens in found.result.new_tokens] == [20] * 3
    assert found.tokens < 60 and len(found.rounds) == max(row.stats.rounds for row in found.result.rows) - SKIP
    assert all(0 <= sum(r.phases.values()) <= r.seconds for r in found.rounds)
    if length == 0:
        assert found.tokens == 3 * (20 - SKIP) and all(r.phases["draft"] < r.seconds for r in found.rounds)
    assert min(found.latencies()) > 0
