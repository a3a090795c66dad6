"""Rows that need the host and rows that do not, in one batch: two groups, and everybody says what they say alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pytest import MonkeyPatch
from transformers import ForcedEOSTokenLogitsProcessor, SuppressTokensAtBeginLogitsProcessor

from engine.device_engines import CUT, GREEDY, SAMPLED, InPython, engine, finish, flown, requests, texts
from forerun.cache.base import CacheFull
from forerun.engine import Engine, Request
from forerun.engine import rounds as rounds_module
from forerun.engine.commit import VerifiedRound
from forerun.engine.pair import Pair
from forerun.engine.roster import Roster
from forerun.engine.rounds import MOST_ROUNDS, SHARE, HostShare
from forerun.engine.row import Row
from forerun.policy import CostModel, HfHeuristic
from forerun.types import BatchView, Rule

Settings = dict[str, Any]


def in_python(request: Request) -> Request:
    return replace(request, processors=(InPython(),))


def hosted(monkeypatch: MonkeyPatch) -> list[tuple[int, bool]]:
    """Rows of each round step by step from now on, and whether rounds of the device were under way meanwhile."""
    seen, run = [], rounds_module.run_on_host

    def counted(batch: list[Row], view: BatchView, pair: Pair) -> VerifiedRound:
        seen.append((len(batch), pair.runner is not None and pair.runner.has_pending))
        return run(batch, view, pair)

    monkeypatch.setattr(rounds_module, "run_on_host", counted)
    return seen


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", list(Rule))
def test_one_row_of_four_calls_python(rule: Rule, monkeypatch: MonkeyPatch) -> None:
    asked = requests(4, new=24)
    asked[1] = in_python(asked[1])
    want = texts(engine(False, rule=rule), asked)
    assert want[1] != texts(engine(False, rule=rule), requests(4, new=24))[1], "the processor does something"
    made = engine(True, rule=rule)
    rounds, by_hand = flown(made), hosted(monkeypatch)
    assert texts(made, asked) == want
    assert max(rounds) == 3 and len(rounds) > 4
    assert {number for number, _ in by_hand} == {1}
    assert any(meanwhile for _, meanwhile in by_hand), "the others run ahead"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CostModel, lambda: HfHeuristic(start=2)], ids=["auto", "hf"])
def test_policies_that_learn(policy: Any) -> None:
    asked = requests(4, GREEDY, new=50)
    asked[2] = in_python(asked[2])
    assert texts(engine(True, policy=policy()), asked) == texts(engine(False, drafter="none"), asked)


def test_progress_is_told_in_the_order_of_the_batch() -> None:
    made, asked = engine(True), requests(4, new=30)
    asked[0] = in_python(asked[0])
    handles = [made.add(request) for request in asked]
    orders = [[entry.row for entry in made.step()] for _ in range(4)]
    assert handles in orders, "a step with both groups"
    assert all(order == sorted(order) for order in orders)


def test_only_the_row_near_a_prescribed_token_goes_step_by_step(monkeypatch: MonkeyPatch) -> None:
    asked = [replace(request, max_new_tokens=40) for request in requests(3)]
    asked[1] = replace(
        asked[1], max_new_tokens=20, processors=(ForcedEOSTokenLogitsProcessor(len(asked[1].prompt) + 20, 5),)
    )
    want = texts(engine(False), asked)
    made = engine(True)
    rounds, by_hand = flown(made), hosted(monkeypatch)
    assert texts(made, asked) == want and want[1][-1] == 5
    assert 3 in rounds and 2 in rounds
    assert sum(number > 1 for number, _ in by_hand) <= 1


@pytest.mark.slow
def test_a_row_joins_the_others_once_it_can(monkeypatch: MonkeyPatch) -> None:
    """What is forbidden at one later position is called in Python; behind it there is nothing to call."""
    asked = [replace(request, max_new_tokens=40) for request in requests(3)]
    late = SuppressTokensAtBeginLogitsProcessor(list(range(0, 97, 2)), len(asked[1].prompt) + 3)
    asked[1] = replace(asked[1], processors=(late,))
    want = texts(engine(False), asked)
    made = engine(True)
    rounds, by_hand = flown(made), hosted(monkeypatch)
    assert texts(made, asked) == want
    assert rounds.index(2) < rounds.index(3) and {number for number, _ in by_hand} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["device", "host"])
def test_one_group_ends_before_the_other(which: str) -> None:
    asked = requests(4, new=6)
    asked[1] = in_python(asked[1])
    longer = [i != 1 for i in range(4)] if which == "host" else [i == 1 for i in range(4)]
    asked = [replace(r, max_new_tokens=40 if long else 6) for r, long in zip(asked, longer, strict=True)]
    made = engine(True)
    assert texts(made, asked) == texts(engine(False), asked)
    assert made.runner is not None and not made.runner.has_pending


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_abort_of_a_row_of_either_group(which: int) -> None:
    asked = requests(3, new=30)
    asked[1] = in_python(asked[1])
    want = texts(engine(False), asked)
    made = engine(True)
    handles = [made.add(request) for request in asked]
    for _ in range(3):
        made.step()
    made.abort(handles[which])
    got = finish(made)
    assert got[which] == want[which][: len(got[which])]
    assert {i: got[i] for i in range(3) if i != which} == {i: want[i] for i in range(3) if i != which}
    assert made.target.cache.rows == ()


class FailsOnce(InPython):
    failed = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 12 and not FailsOnce.failed:
            FailsOnce.failed = True
            raise RuntimeError("not today")
        return super().__call__(input_ids, scores)


def test_a_step_whose_second_group_fails_has_done_nothing() -> None:
    asked = requests(3, new=30)
    asked[1] = in_python(asked[1])
    want = texts(engine(False, drafter="none"), asked)
    asked[1] = replace(asked[1], processors=(FailsOnce(),))
    made = engine(True, drafter="none")  # a draft that fails is only left out
    told: dict[int, list[int]] = {made.add(request): [] for request in asked}

    def run() -> None:
        while not made.is_idle:
            for entry in made.step():
                told[entry.row] += entry.tokens

    with pytest.raises(RuntimeError, match="not today"):
        run()
    run()
    results = made.take_results_by_handle()
    assert {result.request.request_id: result.tokens for result in results.values()} == want
    assert {handle: tuple(tokens) for handle, tokens in told.items()} == {
        handle: result.tokens for handle, result in results.items()
    }, "what the failed step had gained was taken back, and told later"


def test_the_devices_last_row_leaves_while_its_round_is_under_way() -> None:
    asked = requests(3, new=20)
    asked[1] = in_python(asked[1])
    want, made = texts(engine(False), asked), engine(True)
    device, _ = made.add(asked[0]), made.add(asked[1])
    made.step()
    made.step()
    assert made.runner is not None and made.runner.has_pending
    made.abort(device)
    late = made.add(asked[2])
    assert late in {entry.row for _ in range(3) for entry in made.step()}, "nobody waits for that round"
    got = finish(made)
    assert got[1] == want[1] and got[2] == want[2]


@pytest.mark.slow
def test_a_row_that_found_no_room_and_was_given_up_grounds_nobody(monkeypatch: MonkeyPatch) -> None:
    """While it waits for room nothing is sent off early; once it has left, rounds are again."""
    asked = requests(3, new=40)
    asked[1] = in_python(asked[1])
    want, run = texts(engine(False), asked), rounds_module.run_on_host
    made = engine(True)
    handles = [made.add(request) for request in asked]

    def full(batch: list[Row], view: BatchView, pair: Pair) -> VerifiedRound:
        if pair.runner is not None and pair.runner.has_pending:
            raise CacheFull("no room beside the others")
        return run(batch, view, pair)

    monkeypatch.setattr(rounds_module, "run_on_host", full)
    assert made.runner is not None
    while not made.roster.is_crowded:
        made.step()
    made.abort(handles[1])
    made.step()
    made.step()
    assert made.runner.has_pending, "the next round is on its way"
    got = finish(made)
    assert (got[0], got[2]) == (want[0], want[2])


@pytest.mark.parametrize("leave", (Roster.preempt_newest, Roster.start_over), ids=("waits again", "starts over"))
def test_a_row_that_found_no_room_and_waits_again_grounds_nobody(leave: Callable[[Roster], None]) -> None:
    made = engine(True)
    for request in requests(3, new=40):
        made.add(request)
    made.step()
    assert made.runner is not None
    made.runner.discard_pending()
    made.roster.is_crowded = True
    leave(made.roster)
    assert not made.roster.is_crowded


@pytest.mark.slow
def test_rows_that_come_later() -> None:
    def found(on_device: bool) -> Any:
        made, asked = engine(on_device), requests(6)
        asked[1], asked[4] = in_python(asked[1]), in_python(asked[4])
        for request in asked[:3]:
            made.add(request)
        made.step()
        made.step()
        for request in asked[3:]:
            made.add(request)
        return finish(made)

    assert found(True) == found(False)


def play(made: Engine, seed: int) -> Any:
    """Rows of all kinds that come, and some that are aborted, at random; what those that were not have said."""
    rng = random.Random(seed)
    asked = []
    for request in requests(rng.randint(3, 8), [rng.choice((SAMPLED, GREEDY, CUT)) for _ in range(8)], new=14):
        kind = rng.random()
        if kind < 0.35:
            asked.append(in_python(request))
        elif kind < 0.6:
            asked.append(replace(request, params=replace(request.params, repetition_penalty=1.4)))
        else:
            asked.append(request)
    aborted: set[int] = set()
    handles: dict[int, int] = {}
    while asked or not made.is_idle:
        if asked and rng.random() < 0.5:
            request = asked.pop(0)
            handles[request.request_id] = made.add(request)
        if handles and rng.random() < 0.04:
            victim = rng.choice(sorted(handles))
            made.abort(handles[victim])
            aborted.add(victim)
        made.step()
    found = {result.request.request_id: result.tokens for result in made.take_results()}
    return {number: tokens for number, tokens in found.items() if number not in aborted}, aborted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_any_rows_at_any_time(seed: int) -> None:
    rng = random.Random(seed + 1000)
    settings: Settings = {
        "rule": rng.choice(list(Rule)),
        "drafter": rng.choice(("model", "model", "none", "lookup")),
        "policy": rng.randint(1, 5),
    }
    got, aborted = play(engine(True, **settings), seed)
    want, others = play(engine(False, **settings), seed)
    for number in got.keys() & want.keys():
        assert got[number] == want[number]
    assert got.keys() >= want.keys() - aborted and want.keys() >= got.keys() - others


class TestShare:
    def test_the_others_lose_no_more_than_their_share(self) -> None:
        share, device, host = HostShare(), 0.0, 0.0
        for _ in range(300):
            share.add_device_round(6.0)
            device += 6.0
            if share.is_due:
                share.add_host_round(8.0)
                host += 8.0
        assert 0.5 * SHARE < host / device <= SHARE

    def test_nobody_waits_for_ever(self) -> None:
        share = HostShare()
        share.add_host_round(1000.0)
        for _ in range(MOST_ROUNDS):
            assert not share.is_due
            share.add_device_round(1.0)
        assert share.is_due

    def test_cheap_rounds_are_had_in_every_step(self) -> None:
        share = HostShare()
        for _ in range(5):
            share.add_device_round(6.0)
            assert share.is_due
            share.add_host_round(1.0)


@pytest.mark.quick("model")
@pytest.mark.parametrize("drafter", ["model", "feature"])
def test_a_kept_row_that_is_taken_up_again_is_no_longer_the_devices(drafter: str) -> None:
    """The row that ended is still in the device's table, and nobody there knows that its number has a new text."""
    first, beside = (replace(one, max_new_tokens=new) for one, new in zip(requests(2, GREEDY), (3, 60), strict=True))
    first = replace(first, prompt=tuple(range(1, 9)))
    later = replace(first, prompt=(*first.prompt, *range(40, 70)), request_id=7, processors=(InPython(),))
    made = engine(True, drafter=drafter, keep_rows=1)
    for request in (first, beside):
        made.add(request)
    while not made.take_results():
        made.step()
    assert len(made.roster.running) == 1
    made.add(later)
    assert finish(made)[7] == texts(engine(False, drafter=drafter), [later])[7]
