"""A draft cut to its likeliest tokens: reported as drawn, and lossless."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness.controls import Misreporting
from exactness.sampling import PROMPT, Loop, draft_model, verdict
from forerun.drafters import TopK
from forerun.errors import InvalidArgument
from forerun.types import Draft, DraftContext, Law
from support.markov import joint_law, toy_pair

NUMBER = 6_000


class Spread:
    """The law before it was cut, more or less: what was cut off is given a tenth."""

    def __init__(self, law: Law) -> None:
        self.law = law

    def of(self, tokens: Tensor) -> Tensor:
        return self.law.of(tokens) * 0.9 + 0.1 / 3

    def at(self, position: Tensor) -> Tensor:
        return self.law.at(position) * 0.9 + 0.1 / 3


@pytest.mark.slow
def test_the_law_is_cut_and_the_text_is_not() -> None:
    seen: list[Tensor] = []

    def report(draft: Draft, context: DraftContext) -> Law:
        seen.append(draft.law.at(torch.zeros_like(draft.lengths)))
        return draft.law

    drafter = Misreporting(TopK(draft_model(toy_pair(3)[1]), 2), report)
    assert not verdict(Loop(drafter, "3").sample(NUMBER), joint_law(toy_pair(3)[0], PROMPT, 4))
    laws = torch.cat(seen)
    assert int((laws > 0).sum(dim=-1).max()) == 2
    torch.testing.assert_close(laws.sum(dim=-1), torch.ones(len(laws)))


@pytest.mark.slow
def test_control_reported_uncut() -> None:
    drafter = Misreporting(TopK(draft_model(toy_pair(3)[1]), 1), lambda draft, context: Spread(draft.law))
    assert verdict(Loop(drafter, "3").sample(NUMBER), joint_law(toy_pair(3)[0], PROMPT, 4))


@pytest.mark.parametrize("k", [0, -1, True, 2.5])
def test_settings_are_checked(k: int) -> None:
    with pytest.raises(InvalidArgument, match="k="):
        TopK(draft_model(toy_pair(3)[1]), k)
