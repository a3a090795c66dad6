"""Who is here, by which number, and in which order rows come back."""

from __future__ import annotations

import pytest
import torch

from forerun.engine.faults import Faults
from forerun.engine.pair import Pair
from forerun.engine.request import FinishReason, Request
from forerun.engine.roster import Roster
from forerun.engine.row import Row
from forerun.engine.stops import StopRule
from forerun.models.scorer import Scorer
from forerun.policy.heuristics import Constant
from forerun.types import Rule
from support.tiny import tiny_model


def roster(number: int, keep_rows: int = 0) -> Roster:
    """With so many rows that run and have read their prompts."""
    pair = Pair(Scorer(tiny_model("llama")), Rule.TOKEN, Faults(), lambda: 0.0, compile=False)
    made = Roster(pair, keep_rows)
    pair.connect(None, Constant(0), None)
    for handle in range(number):
        take_in(made, handle)
    return made


@torch.inference_mode()
def take_in(made: Roster, handle: int) -> Row:
    request = Request(prompt=(1 + handle, 2, 3, 4), max_new_tokens=5, request_id=handle)
    row = Row(handle, request, list(request.prompt), [], StopRule(request, 5, None), None, None)
    made.waiting.append(row)
    made.take_in(row, 0.0)
    made.target.feed([row.number], [row.history[made.target.length(row.number) : -1]])
    row.is_reading = False
    return row


def end(made: Roster, *numbers: int) -> None:
    for number in numbers:
        made.running[number].finish_reason = FinishReason.LENGTH
    with torch.inference_mode():
        made.retire()


def test_numbers_of_rows_that_left_are_given_again_the_lowest_first() -> None:
    made = roster(4)
    end(made, 2, 0)
    assert [take_in(made, handle).number for handle in (4, 5, 6)] == [0, 2, 4]
    assert set(made.results) == {0, 2} and sorted(made.target.cache.rows) == [0, 1, 2, 3, 4]


def test_the_newest_waits_before_all_others_and_whoever_is_left_can_go_on() -> None:
    made = roster(3)
    made.waiting.append(row := made.running.pop(0))  # one that came before it, and has never run
    row.first_logits = made.running[1].first_logits = made.running[2].first_logits = torch.zeros(97)
    made.is_crowded = True
    with torch.inference_mode():
        made.preempt_newest()
    assert [row.handle for row in made.waiting] == [2, 0] and list(made.running) == [1]
    assert made.waiting[0].first_logits is None, "memory is short, and all prompts' logits hang on a row's"
    assert made.is_blocked and not made.is_crowded and made.num_preempted == 1
    assert made.target.cache.rows == (1,) and made.target.length(1) == 3
    assert not made.unjudged, "its round is done anew, and so is the pass that its first token is drawn from"


@pytest.mark.parametrize("keep_rows", [0, 2])
def test_all_begin_again_in_the_order_in_which_they_ran(keep_rows: int) -> None:
    made = roster(3, keep_rows)
    end(made, 1)
    assert made.prefixes.limit == keep_rows and (1 in made.prefixes) == bool(keep_rows)
    made.running[0].first_logits = torch.zeros(97)
    made.start_over()
    assert [row.handle for row in made.waiting] == [0, 2] and not made.running
    assert all(row.first_logits is None for row in made.waiting)
    assert made.target.cache.rows == () and 1 not in made.prefixes
    first = made.waiting[0]
    with torch.inference_mode():
        made.take_in(first, 0.0)
    assert first.number == 0 and first.is_reading and not made.unjudged, "old logits are nobody's"


def test_a_row_that_is_aborted_ends_once_wherever_it_is() -> None:
    made = roster(2)
    made.waiting.append(made.running.pop(1))
    made.aborted = {0, 1, 7}
    with torch.inference_mode():
        made.retire()
    assert {result.finish_reason for result in made.results.values()} == {FinishReason.ABORT}
    assert sorted(made.results) == [0, 1] and made.is_empty and not made.aborted
