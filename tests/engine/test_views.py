"""What a policy is told of rows before a round: when they end, and what a drafter has not read of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.device_engines import DRAFTERS, GREEDY, engine, finish, requests
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.models.scorer import Scorer
from forerun.policy import CostModel, HfHeuristic
from forerun.policy.heuristics import Constant, OwnAcceptance
from forerun.types import BatchView, Draft, RoundOutcome
from support.tiny import tiny_model


class Noting(Constant):
    """Keeps what it was shown."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.views: list[BatchView] = []

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        self.views.append(view)
        return super().lengths(view)


def views(
    drafter: Drafter | str = "model", drafted: int = 2, max_rows: int | None = None, **asked: Any
) -> list[BatchView]:
    model, policy = tiny_model("llama"), Noting(drafted)
    chosen = DRAFTERS[drafter](model) if isinstance(drafter, str) else drafter
    made = Engine(Scorer(model), chosen, policy, join_tokens=0, max_rows=max_rows)
    for request in requests(3, new=8):
        made.add(replace(request, **asked))
    finish(made)
    return policy.views


def test_tokens_left_count_down_to_the_end_of_each_row() -> None:
    seen = views()
    assert seen[0].tokens_left == (8, 13, 18)
    assert all(view.tokens_left == tuple(room + 1 for room in view.max_lengths) for view in seen)


@pytest.mark.parametrize("asked", [{"stop_ids": frozenset({96})}, {"deadline": 1e12}], ids=["stop", "deadline"])
def test_rows_that_may_end_at_any_token_tell_nothing(asked: dict[str, Any]) -> None:
    assert not any(view.tokens_left for view in views(**asked))


def test_nothing_is_told_while_others_wait_for_a_place() -> None:
    seen = views(max_rows=2)
    assert not seen[0].tokens_left and seen[-1].tokens_left, "until the last has come"


def test_a_draft_model_has_read_what_it_drafted_behind() -> None:
    seen = views()
    prompts = [len(request.prompt) for request in requests(3)]
    assert seen[0].unread == tuple(max(length - 2, 0) for length in prompts)
    assert all(view.unread == () for view in seen[1:])


def test_what_is_decoded_without_a_drafter_is_unread() -> None:
    seen = views(drafted=0)
    assert seen[4].unread == tuple(length + 4 for length in (len(r.prompt) - 2 for r in requests(3)))


def test_heads_count_pairs_and_copies_nothing() -> None:
    seen = views("feature")
    assert seen[0].unread == tuple(max(len(request.prompt) - 2, 0) for request in requests(3))
    assert max(seen[2].unread, default=0) <= 2, "what the last round has kept"
    assert not any(view.unread for view in views("lookup"))


class Unsure(Drafter):
    def propose(self, context: Any) -> Any:
        raise NotImplementedError

    def rewind(self, rows: Any, lengths: Any) -> None: ...

    def num_unread(self, row: int, length: int) -> int:
        raise RuntimeError("who knows")


def test_a_drafter_that_cannot_say_is_taken_for_one_that_has_read_all() -> None:
    with pytest.warns(match="who knows"):
        assert not any(view.unread for view in views(Unsure(), drafted=0))


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_requests_with_the_same_id_are_told_apart(on_device: bool) -> None:
    """As those of a server, which key their random numbers by their own seeds: each has the lengths it has alone."""
    asked = [replace(request, request_id=0, seed=i) for i, request in enumerate(requests(4, new=40))]

    def tokens(*some: Request) -> list[tuple[int, ...]]:
        made = engine(on_device, policy=OwnAcceptance())
        handles = [made.add(request) for request in some]
        while not made.is_idle:
            made.step()
        results = made.take_results_by_handle()
        return [results[handle].tokens for handle in handles]

    assert tokens(*asked) == [alone for request in asked for alone in tokens(request)]


def _own(policy: OwnAcceptance) -> int:
    return len(policy._trust)


def _hf(policy: HfHeuristic) -> int:
    return len(policy._length)


def _auto(policy: CostModel) -> int:
    return len(policy._drafting) + policy._acceptance.requests


@pytest.mark.parametrize(
    ("kind", "size"), [(OwnAcceptance, _own), (HfHeuristic, _hf), (CostModel, _auto)], ids=["own", "hf", "auto"]
)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.quick("False-own", "True-hf", "True-auto")
def test_nothing_is_kept_of_requests_that_were_given_up(kind: Any, size: Any, on_device: bool) -> None:
    """Aborted or out of time: no round tells of their end."""
    policy, now, most = kind(), [0.0], 0
    made = engine(on_device, policy=policy)
    made.clock = lambda: now[0]
    for turn in range(4):
        asked = requests(3, GREEDY, new=40)
        handles = [made.add(replace(each, deadline=now[0] + 5)) for each in asked]
        for _ in range(6):
            made.step()
            most = max(most, size(policy))
            now[0] += 0.1
        made.abort(handles[turn % 3])
        made.step()
        now[0] += 6
        finish(made)
    assert most > 0 and size(policy) == 0
    assert made.first_fault is None


def test_a_plain_object_is_told_as_well() -> None:
    class Plain:
        def __init__(self) -> None:
            self.left: list[int] = []

        def lengths(self, view: BatchView) -> tuple[int, ...]:
            return (0,) * len(view.rows)

        def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
            return (0,) * len(view.rows)

        def observe(self, outcome: RoundOutcome) -> None:
            return

        def forget(self, request_ids: tuple[int, ...]) -> None:
            self.left += request_ids

    policy = Plain()
    made = engine(False, policy=policy)  # type: ignore[arg-type]
    handles = [made.add(request) for request in requests(3)]
    made.abort(handles[1])
    finish(made)
    assert policy.left[0] == handles[1] and sorted(policy.left) == handles
