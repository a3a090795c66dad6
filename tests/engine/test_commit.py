"""What rows gain by a verdict, row by row: tokens, counts and log-probabilities of its own positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.engine.adjust import adjuster
from forerun.engine.branching import kept_of
from forerun.engine.commit import VerifiedRound, commit
from forerun.engine.request import FinishReason, Request
from forerun.engine.row import Row
from forerun.engine.stats import Seconds
from forerun.engine.stops import StopRule
from forerun.types import Verdict

VOCAB = 7


def row_of(number: int, **settings: Any) -> Row:
    request = Request(prompt=(1, 2), max_new_tokens=20, request_id=number, **settings)
    output: list[int] = []
    return Row(number, request, [1, 2], output, StopRule(request, 20, None), adjuster(request, output), None)


def round_of(rows: list[Row], drafts: Sequence[Sequence[int]], verdict: Verdict, **more: Any) -> VerifiedRound:
    blocks = [[row.history[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
    kept = kept_of(verdict, blocks, None)
    return VerifiedRound(rows, blocks, kept, verdict, sum(map(len, blocks)), 0, Seconds(), **more)


def logits_of(drafts: Sequence[Sequence[int]]) -> Tensor:
    return torch.randn(sum(len(draft) + 1 for draft in drafts), VOCAB, dtype=torch.float64)


def verdict_of(accepted: list[int], following: list[int], finite: bool = True, tokens: Any = None) -> Verdict:
    return Verdict(
        torch.tensor(accepted), torch.tensor(following), torch.tensor([finite] * len(accepted)), tokens=tokens
    )


def test_tokens_in_place_of_ragged_drafts_change_neither_counts_nor_positions() -> None:
    """A rule that emits other tokens than were drafted gives them as wide as the longest draft."""
    rows, drafts = [row_of(i, logprobs=0) for i in range(3)], [[3], [4, 5, 6], []]
    logits = logits_of(drafts)
    emitted = torch.tensor([[6, 0, 0], [5, 5, 0], [0, 0, 0]])
    progress = commit(round_of(rows, drafts, verdict_of([1, 2, 0], [2, 3, 4], tokens=emitted), logits=logits))
    assert [entry.tokens for entry in progress] == [(6, 2), (5, 5, 3), (4,)]
    assert [row.counts for row in rows] == [(1, 1, 2, 1, False), (3, 2, 3, 3, False), (0, 0, 1, 0, False)]
    laws, start = logits.log_softmax(-1), 0
    for entry, draft in zip(progress, drafts, strict=True):
        own = [laws[start + i, token].item() for i, token in enumerate(entry.tokens)]
        assert [one.logprob for one in entry.logprobs] == pytest.approx(own)
        start += len(draft) + 1


def test_more_alternatives_than_there_are_tokens() -> None:
    rows, logits = [row_of(0, logprobs=VOCAB + 3)], logits_of([[]])
    (gained,) = commit(round_of(rows, [[]], verdict_of([0], [5]), logits=logits))
    assert [token for token, _ in gained.logprobs[0].top] == logits[0].argsort(descending=True).tolist()


@pytest.mark.parametrize(("settings", "asked"), [({}, 0), ({"params": SamplingParams(presence_penalty=0.5)}, 1)])
def test_a_row_that_failed_is_scored_again_where_an_option_may_be_the_cause(
    settings: dict[str, Any], asked: int
) -> None:
    """Where there is none it is the target's own fault, and nobody has to run another pass to say so."""
    calls: list[Sequence[int]] = []

    def score_again(row: Row, block: Sequence[int]) -> Tensor:
        calls.append(block)
        return torch.full((len(block), VOCAB), torch.nan)

    rows = [row_of(0, **settings)]
    (gained,) = commit(round_of(rows, [[3]], verdict_of([0], [0], finite=False), steps=1, score_again=score_again))
    assert gained.finish_reason is FinishReason.ERROR and gained.tokens == () and "check the model's" in rows[0].error
    assert calls == [[2, 3]] * asked
