"""Rounds sent off before the last one was heard of, by a policy that learns: the tokens of those lengths, no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.device_engines import GREEDY, SAMPLED, engine, finish, requests, texts
from engine.following import Follows, Replayed
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import SamplingParams
from forerun.engine.commit import VerifiedRound
from forerun.engine.device.recorder import Marks
from forerun.engine.device.shapes import ShapeChooser
from forerun.engine.row import Row
from forerun.types import Rule


@pytest.mark.quick("params0-1-token")
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
@pytest.mark.parametrize(("params", "number"), [(SAMPLED, 1), (SAMPLED, 5), (GREEDY, 3)])
def test_same_tokens_as_step_by_step_with_the_same_lengths(params: SamplingParams, number: int, rule: Rule) -> None:
    policy = Follows()
    got = texts(engine(True, policy=policy, rule=rule), requests(number, params, new=40))
    assert len({length for lengths in policy.drafted.values() for length in lengths}) > 3
    assert got == texts(engine(False, policy=Replayed(policy.drafted), rule=rule), requests(number, params, new=40))


def test_the_next_round_is_asked_for_before_the_last_is_heard_of() -> None:
    def asked_early(policy: Follows) -> list[int]:
        texts(engine(True, policy=policy), requests(3, new=40))
        heard = [turn for what, turn in policy.events if what == "heard"]
        assert heard == sorted(heard)
        place = {event: i for i, event in enumerate(policy.events)}
        return [later for turn, later in pairwise(heard) if place["asked", later] < place["heard", turn]]

    ahead, waiting = asked_early(Follows()), asked_early(Follows(runs_ahead=False))
    assert len(ahead) > 8 and not waiting


@pytest.mark.quick("True")
@pytest.mark.parametrize("in_blocks", [True, False])
def test_a_newcomers_prompt_follows_the_round_under_way(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of it than a round lets through. Where rows lie in one piece, and might have to move, after the round."""
    cache = PagedCache(400, torch.device("cpu"), block_size=8) if in_blocks else None
    made = engine(True, cache=cache, ahead=False)
    made.prompt_tokens = 5
    assert made.runner is not None
    first, second = requests(2, new=12)
    second = replace(second, prompt=tuple(range(1, 10)))
    read, collect = list[int](), made.runner.collect

    def collected() -> VerifiedRound:
        rows = made.roster.running.values()
        read.append(sum(made.target.length(row.number) for row in rows if row.request is second))
        return collect()

    monkeypatch.setattr(made.runner, "collect", collected)
    made.add(first)
    made.step()
    launch, runner = made.runner.launch, made.runner

    def come(*given: Any, **named: Any) -> None:
        launch(*given, **named)
        monkeypatch.setattr(runner, "launch", launch)
        made.add(second)

    monkeypatch.setattr(runner, "launch", come)
    said = finish(made)
    assert read[:3] == ([0, 5, 8] if in_blocks else [0, 0, 5])
    assert said == texts(engine(False), [first, second])


def test_who_comes_while_a_round_is_under_way_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the next one has not been sent off, which is when the present one is nearly over."""

    def pending_after_arrival(seconds_left: float, is_over: bool = False) -> tuple[int, int]:
        made = engine(True)
        first, second = requests(2, new=60)
        made.add(first)
        made.step()
        assert made.runner is not None and len(made.runner.pending) == 1
        (kind,) = made.runner._took
        made.runner._took[kind] = (made.clock() - made.runner._began + seconds_left,)
        monkeypatch.setattr(Marks, "is_over", lambda marks: is_over)
        looks = list[int]()

        def come() -> None:
            looks.append(1)
            if len(looks) == 2:
                made.add(second)

        made.arrivals = come
        made.step()
        return len(made.runner.pending), len(looks)

    assert pending_after_arrival(10.0) == (0, 2), "nothing more was sent off"
    assert pending_after_arrival(0.0) == (1, 1), "there was no time left to wait for anybody"
    assert pending_after_arrival(10.0, is_over=True) == (1, 1), "nobody waits for a round that is over"


def test_what_took_long_once_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(True)
    made.add(requests(1, new=60)[0])
    made.step()
    runner = made.runner
    assert runner is not None
    monkeypatch.setattr(Marks, "is_over", lambda marks: False)
    real, left = Marks.seconds, list[float]()
    for taken in (0.1, 9.0, 0.2, 9.0, 9.0):
        monkeypatch.setattr(Marks, "seconds", lambda marks, taken=taken: [taken, 0.0, 0.0])
        made.step()
        left.append(runner.seconds_left + made.clock() - runner._began)
    assert [round(seconds, 3) for seconds in left[1:]] == [0.1, 0.2, 0.2, 9.0], "the second time it is"
    monkeypatch.setattr(Marks, "seconds", real)
    finish(made)


def test_a_forced_size_is_recorded_at_once_and_others_are_stood_in_for() -> None:
    chooser = ShapeChooser(patience=2)
    assert chooser.pick("kind", 12, 12, force=True) == 12
    assert chooser.pick("kind", 8, 8) == 12
    assert chooser.pick("kind", 8, 8, force=True) == 8
    assert chooser.pick("kind", 5, 6) == 8
    assert chooser.pick("moved", 5, 6) == 6


@pytest.mark.slow
def test_rows_stay_among_empty_places_for_a_while() -> None:
    """A smaller size that is known is no reason to stop rounds that are in the air, until it has been for long."""
    made = engine(True, policy=2)
    assert made.runner is not None
    first = texts(made, requests(4, new=12))
    texts(made, requests(1, new=12))
    seen, launch = [], made.runner.launch

    def counted(rows: Sequence[Row], *asked: Any) -> None:
        launch(rows, *asked)
        assert made.runner is not None and made.runner._round is not None
        seen.append((len(rows), made.runner._round.table.size))

    made.runner.launch = counted  # type: ignore[method-assign]
    *short, long = requests(4, new=12)
    got = texts(made, [*short, replace(long, max_new_tokens=60)])
    sizes = [size for _, size in seen]
    moved = sizes.index(1)
    assert set(sizes[:moved]) == {4} and set(sizes[moved:]) == {1}
    assert seen.count((1, 4)) >= 10, "the last row has waited"
    assert {i: got[i] for i in range(3)} == {i: first[i] for i in range(3)}
    assert got[3][: len(first[3])] == first[3]


def test_recordings_of_before_keys_moved_do_not_count_as_known() -> None:
    made = engine(True, policy=2)
    assert made.runner is not None
    texts(made, requests(1, new=12))
    before = made.runner._versions
    texts(made, requests(4, new=12))
    assert made.runner._versions != before
    known = made.runner._sizes._known
    assert 1 in known[2, before] and 1 not in known[2, made.runner._versions] and 4 in known[2, made.runner._versions]


def test_rows_that_leave_together_move_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copy = [], RaggedCache._copy

    def counted(cache: RaggedCache, source: int, target: int, length: int) -> None:
        copied.append((source, target))
        copy(cache, source, target, length)

    monkeypatch.setattr(RaggedCache, "_copy", counted)
    made = engine(True, policy=2)
    texts(made, requests(5, new=12))
    assert made.target.cache.rows == () and not copied
