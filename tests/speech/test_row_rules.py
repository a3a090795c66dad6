"""What is remembered of a row: what its text was chosen from, on the way it really went."""

from __future__ import annotations

import pytest
import torch

from forerun.speech import rules as module
from forerun.speech.rules import RowRules

VOCAB, PROMPT = 11, [5, 6]


def logits_after(said: list[int], drafted: list[int]) -> torch.Tensor:
    """[n, V] that tell the way to each position apart."""
    ways = [[*said, *drafted[:i]] for i in range(len(drafted) + 1)]
    return torch.stack([torch.full((VOCAB,), float(hash(tuple(way)) % 1000)) for way in ways])


@pytest.mark.parametrize("most_open", [3, 10_000], ids=["forgetful", "roomy"])
def test_scores_are_those_of_the_way_taken(monkeypatch: pytest.MonkeyPatch, most_open: int) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", most_open)
    monkeypatch.setattr(module, "DEEPEST", 3)
    row = RowRules(None, (), len(PROMPT), [], True)
    text = [(7 * i) % VOCAB for i in range(24)]
    for start in range(0, 24, 2):
        said, right = text[:start], text[start : start + 2]
        wrong = [right[0], (right[1] + 1) % VOCAB, 3]
        row.along([*PROMPT, *said], wrong, logits_after(said, wrong))  # a drafter, or another branch
        row.along([*PROMPT, *said, wrong[0]], wrong[1:], logits_after([*said, wrong[0]], wrong[1:]))
        row.along([*PROMPT, *said], right, logits_after(said, right) + 0.5)  # the target
    expected = torch.stack([logits_after(text[:i], [])[0] + 0.5 for i in range(24)])
    torch.testing.assert_close(row.scores(text), expected)
    assert row._scores is not None and (most_open > 3 or len(row._scores) < 40)


def test_the_beginning_of_a_window_is_kept_as_the_model_gave_it() -> None:
    row = RowRules(None, (lambda ids, scores: scores - 7,), len(PROMPT), [], False)
    logits = logits_after([], [1])
    row.along(PROMPT, [1], logits.clone())
    row.along([*PROMPT, 1], [], logits_after([1], []))
    assert row.first is not None
    torch.testing.assert_close(row.first, logits[0])
