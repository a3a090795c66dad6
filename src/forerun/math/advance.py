"""After a verdict: what the next round of the same rows starts from, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.types import Verdict

HEAD = 4  # numbers of a result before the drafted tokens: kept, next token, whether finite, drafted


@dataclass(frozen=True, slots=True)
class Standing:
    """Where rows of a device round stand. All of it is changed in place."""

    past: Tensor  # [R] int64, keys that stand
    round: Tensor  # [R] int64, the row's own
    position: Tensor  # [R] int64, new tokens so far
    active: Tensor  # [R] int64, 0 for a place without a row, which stays where it is
    block: Tensor  # [R, 1 + W] int64: the token before the last one, the last one, the draft behind it
    result: Tensor  # [R, HEAD + W - 1] int64, for the host


def advance(standing: Standing, drafted: Tensor, verdict: Verdict, vocab_size: int) -> None:
    """Write down what became of `drafted` [R] tokens a row, and move every row to the end of what it gained.

    A row whose logits were no numbers has no next token worth the name; whatever stands there is made one that can be
    looked up, because the next round may be under way before the host hears of it.
    """
    kept = verdict.num_accepted
    following = verdict.next_token.clamp(0, vocab_size - 1)
    block, result = standing.block, standing.result
    result[:, 0], result[:, 1], result[:, 2], result[:, 3] = kept, following, verdict.finite, drafted
    result[:, HEAD:] = block[:, 2:]
    block[:, 0] = block.gather(1, (kept + 1).unsqueeze(-1)).squeeze(-1)
    block[:, 1] = following
    gained = (kept + 1) * standing.active
    standing.past.add_(gained)
    standing.position.add_(gained)
    standing.round.add_(standing.active)


def draft_lengths(asked: Tensor, budget: Tensor, position: Tensor) -> Tensor:
    """[R] what was asked for, where the row's budget has room for it and the token behind it."""
    return torch.minimum(asked, budget - position - 1).clamp(min=0)
