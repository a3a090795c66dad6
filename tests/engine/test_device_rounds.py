"""Rounds that the device runs by itself say what rounds step by step say, token for token.

On a CPU nothing is recorded and the same work is called; on a GPU (`test_device_graphs`) it is replayed from graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device_engines import (
    CUT,
    GREEDY,
    SAMPLED,
    InPython,
    Texts,
    engine,
    finish,
    flown,
    rehearsing,
    requests,
    texts,
)
from forerun import ops
from forerun.config import SamplingParams
from forerun.engine import Request, RowResult
from forerun.policy import Constant, CostModel, HfHeuristic
from forerun.policy.base import Policy
from forerun.types import BatchView, Rule

CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "block": {"rule": Rule.BLOCK},
    "coupled": {"rule": Rule.COUPLED},
    "long drafts": {"policy": 9},
    "one token": {"policy": 1},
    "plain": {"drafter": "none"},
    "window": {"family": "gemma3"},
    "learned positions": {"family": "gpt2"},
    "not ahead": {"ahead": False},
    "lookup": {"drafter": "lookup"},
    "chain": {"drafter": "chain", "policy": 3},
    "chain of a head": {"drafter": "chain of a head", "policy": 3},
    "chain by blocks": {"drafter": "chain", "policy": 6, "rule": Rule.BLOCK},
    "lookup by blocks": {"drafter": "lookup", "rule": Rule.BLOCK, "policy": 7},
}


@pytest.mark.parametrize(
    ("case", "params", "number"),
    [
        *[(case, SAMPLED, 3) for case in CASES],
        *[(case, GREEDY, 1) for case in ("token", "plain", "lookup", "chain")],
        *[(case, SAMPLED, 8) for case in ("token", "block")],
    ],
)
@pytest.mark.quick("coupled-params2-3", "chain by blocks-params12-3")
def test_same_tokens_as_step_by_step(case: str, params: SamplingParams, number: int) -> None:
    settings = CASES[case]
    want = texts(engine(False, **settings), requests(number, params))
    made = engine(True, **settings)
    rounds = flown(made)
    assert texts(made, requests(number, params)) == want
    assert rounds and max(rounds) == number


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("drafter", "rule"), [("random", Rule.TOKEN), ("doubting", Rule.BLOCK)])
def test_the_target_alone_is_recorded_where_the_draft_cannot_be(drafter: str, rule: Rule) -> None:
    settings: dict[str, Any] = {"drafter": drafter, "rule": rule, "policy": 3}
    want = texts(engine(False, **settings), requests(3))
    made = engine(True, **settings)
    assert made.runner is not None and not made.runner.drafts
    scored, score = [], made.runner.score

    def counted(rows: Any, blocks: Any) -> Any:
        scored.append(max(map(len, blocks)))
        return score(rows, blocks)

    made.runner.score = counted  # type: ignore[method-assign]
    assert texts(made, requests(3)) == want
    assert len(scored) > 3 and max(scored) >= 3


def test_same_tokens_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with several rows: a kernel that read a row's number where another's lies would be seen here."""
    pytest.importorskip("support.triton_cpu")
    asked = [replace(request, prompt=(3, *request.prompt), max_new_tokens=6) for request in requests(2)]
    want = texts(engine(False, policy=2), asked)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: True)
    assert texts(engine(True, policy=2), asked) == want


class Ear:
    """Hears every position's hidden state."""

    def __init__(self) -> None:
        self.heard: dict[tuple[int, int], Tensor] = {}

    def on_hidden_states(
        self,
        rows: Sequence[int],
        past: Sequence[int],
        counts: Sequence[int],
        hidden: Tensor,
        finished: Sequence[int] | None = None,
    ) -> None:
        assert finished is None
        places = [(row, p + i) for row, p, count in zip(rows, past, counts, strict=True) for i in range(count)]
        self.heard.update(zip(places, hidden.clone(), strict=True))

    def on_copy(self, source: int, row: int, length: int) -> None: ...

    def on_keep(self, row: int, start: int, picks: Sequence[int]) -> None: ...


def test_who_listens_hears_recorded_passes_too() -> None:
    def heard(on_device: bool) -> tuple[Texts, Ear]:
        made, ear = engine(on_device, drafter="random"), Ear()
        made.target.observers.append(ear)
        return texts(made, requests(3)), ear

    (ours, our_ear), (theirs, their_ear) = heard(True), heard(False)
    assert ours == theirs and our_ear.heard.keys() == their_ear.heard.keys()
    for place, hidden in our_ear.heard.items():
        torch.testing.assert_close(hidden, their_ear.heard[place], rtol=1e-4, atol=1e-4)


def test_parameters_of_all_kinds_in_one_batch() -> None:
    mixed = [SAMPLED, GREEDY, CUT, replace(SAMPLED, min_p=0.05), CUT]
    assert texts(engine(True), requests(5, mixed)) == texts(engine(False), requests(5, mixed))


@pytest.mark.slow
def test_rows_that_come_later() -> None:
    def found(on_device: bool) -> Texts:
        made, asked = engine(on_device), requests(6)
        for request in asked[:3]:
            made.add(request)
        made.step()
        made.step()
        for request in asked[3:]:
            made.add(request)
        return finish(made)

    assert found(True) == found(False)


@pytest.mark.slow
def test_rounds_of_both_kinds_take_turns() -> None:
    """A row with a processor of Python's is decoded step by step, and so is everybody while it is there."""

    def found(on_device: bool, seen: list[int]) -> Texts:
        made, asked = engine(on_device), requests(4, new=30)
        rounds = flown(made) if on_device else []
        asked[1] = replace(asked[1], processors=(InPython(),), max_new_tokens=9)
        made.add(asked[0])
        made.step()
        made.add(asked[1])
        made.add(asked[2])
        for _ in range(6):
            made.step()
        made.add(asked[3])
        got = finish(made)
        seen[:] = rounds
        return got

    seen: list[int] = []
    assert found(True, seen) == found(False, [])
    assert 1 in seen and 3 in seen, "the device had rounds before and after that row"


def test_nothing_is_recorded_twice_where_rounds_take_turns() -> None:
    made = rehearsing(engine(True, policy=3))
    asked = [replace(request, prompt=(9, 8), max_new_tokens=12) for request in requests(4)]
    asked[2] = replace(asked[2], processors=(InPython(),))
    for request in asked:
        texts(made, [request])
    assert made.runner is not None and made.runner.recordings.num_moved == 0


def test_a_rehearsal_leaves_no_trace() -> None:
    made = rehearsing(engine(True))
    assert texts(made, requests(3)) == texts(engine(False), requests(3))
    assert made.runner is not None and made.runner.recorder.num_recordings >= 3


@pytest.mark.quick("float32")
@pytest.mark.parametrize(("double", "most"), [(False, 1e-5), (True, 1e-13)], ids=["float32", "float64"])
def test_log_probabilities_of_what_was_emitted(double: bool, most: float) -> None:
    """Of the model's own distribution. A model in float64 meets float32 nowhere on its way through the device."""

    def found(on_device: bool) -> list[RowResult]:
        made, (first, second, third) = engine(on_device, double=double), requests(3, [SAMPLED, CUT, SAMPLED])
        rounds = flown(made) if on_device else []
        for request in (replace(first, logprobs=0), replace(second, logprobs=0), third):
            made.add(request)
        while not made.is_idle:
            made.step()
        assert rounds or not on_device
        return sorted(made.take_results(), key=lambda result: result.request.request_id)

    for got, want in zip(found(True), found(False), strict=True):
        assert got.tokens == want.tokens and (got.logprobs is None) == (want.logprobs is None)
        for ours, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
            assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, rel=0, abs=most)


@pytest.mark.slow
def test_a_stop_in_the_middle_of_a_round() -> None:
    plain = texts(engine(False), requests(3, new=40))
    stop = plain[0][len(plain[0]) // 2]
    asked = [replace(request, stop_ids=frozenset({stop})) for request in requests(3, new=40)]
    want = texts(engine(False), asked)
    assert len(want[0]) < len(plain[0])
    assert texts(engine(True), asked) == want


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CostModel, lambda: HfHeuristic(start=2)], ids=["auto", "hf"])
def test_policies_that_learn(policy: Callable[[], Policy]) -> None:
    """Greedy text does not depend on draft lengths; rounds with and without drafts follow each other."""
    want = texts(engine(False, drafter="none"), requests(3, GREEDY, new=60))
    made = engine(True, policy=policy())
    assert texts(made, requests(3, GREEDY, new=60)) == want


class ByTurns(Constant):
    """Other lengths every round, none among them; the same ones whenever it is asked as often."""

    is_fixed = False

    def __init__(self) -> None:
        super().__init__(0)
        self.asked = 0

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        self.asked += 1
        self.n = (3, 0, 0, 2, 5, 0, 1)[self.asked % 7]
        each = zip(view.request_ids, super().lengths(view), strict=True)
        return tuple(max(0, length - number % 2) for number, length in each)


@pytest.mark.slow
def test_a_drafter_reads_up_after_rounds_without_drafts() -> None:
    asked = [replace(request, prompt=(9, *request.prompt), max_new_tokens=40) for request in requests(3)]
    assert texts(engine(True, policy=ByTurns()), asked) == texts(engine(False, policy=ByTurns()), asked)


def test_abort_while_a_round_is_in_the_air() -> None:
    want = texts(engine(False), requests(3, new=30))
    made = engine(True)
    numbers = [made.add(request) for request in requests(3, new=30)]
    made.step()  # one prompt has a single token, which makes the first round one of the other kind
    made.step()
    assert made.runner is not None and made.runner.has_pending
    made.abort(numbers[1])
    got = finish(made)
    assert got[1] == want[1][: len(got[1])] and len(got[1]) < len(want[1])
    assert {i: got[i] for i in (0, 2)} == {i: want[i] for i in (0, 2)}
    assert made.target.cache.rows == ()


@pytest.mark.slow
def test_a_row_that_has_finished_keeps_its_seat_and_stays_where_it_is() -> None:
    lengths = zip(requests(2), (5, 90), strict=True)
    short, long = (replace(request, prompt=(9, *request.prompt), max_new_tokens=n) for request, n in lengths)
    want = texts(engine(False), [short, long])
    made = engine(True)
    for request in (short, long):
        made.add(request)
    while len(made.roster.running) == 2:
        made.step()
    for _ in range(3):
        made.step()
    assert made.runner is not None and made.runner._round is not None
    table = made.runner._round.table
    assert len(table.rows) == 2 and len(table.running) == 1 and len(made.target.cache.rows) == 2
    past = table.row_state.past.tolist()
    made.step()
    gained = [after - before for before, after in zip(past, table.row_state.past.tolist(), strict=True)]
    assert min(gained) == 0 < max(gained)
    assert finish(made) == want
    assert made.target.cache.rows == ()


def test_rows_aborted_together_move_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the round in the air, then the last slot goes first: no place is filled with another row's keys."""
    made, moved = engine(True), []
    numbers = [made.add(request) for request in requests(3)]
    made.step()
    assert made.runner is not None and made.runner.has_pending
    monkeypatch.setattr(type(made.target.cache), "_copy", lambda *given: moved.append(given[1:]))
    for number in numbers:
        made.abort(number)
    assert made.is_idle and made.target.cache.rows == () and moved == []


def test_a_kept_row_goes_on() -> None:
    def found(on_device: bool) -> Texts:
        made = engine(on_device, keep_rows=2)
        first = texts(made, requests(1))
        prompt = (*requests(1)[0].prompt, *first[0], 5, 6)
        return texts(made, [Request(prompt=prompt, max_new_tokens=20, params=SAMPLED, seed=4, request_id=9)])

    assert found(True) == found(False)


def test_recording_is_told_in_the_round_that_it_held_up() -> None:
    """The next round is sent off before this one's tokens are handed out, and may have to be recorded first."""
    made = rehearsing(engine(True, policy=HfHeuristic()))
    for request in requests(3):
        made.add(request)
    told, spent = [], []
    while not made.is_idle:
        made.step()
        assert made.runner is not None
        told.append(made.seconds.capture)
        spent.append(made.runner.recorder.seconds)
    assert told == spent
    assert spent[0] < spent[-1]
