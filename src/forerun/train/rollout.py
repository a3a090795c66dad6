"""Continuations drafted by the draft as it is: later positions are then trained on the tokens they will meet."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.train.shared_head import SharedHead
from forerun.train.students import Student


@torch.no_grad()
def roll_out(
    student: Student,
    head: SharedHead,
    tokens: Tensor,  # [R, L] int64
    features: Tensor | None,  # [R, L, H] of these tokens
    cuts: Tensor,  # [R] int64, the last token of each row that stays
    length: int,
    generator: torch.Generator,
) -> Tensor:
    """Tokens [R, L] with up to `length` drafted ones after each cut, as far as the rows are wide.

    Each step runs over the whole row again: the layers are few, and nothing can go stale.
    """
    tokens = tokens.clone()
    given = None if features is None else features.clone()
    row = torch.arange(len(tokens), device=tokens.device)
    for step in range(length):
        now = (cuts + step).clamp(max=tokens.shape[1] - 2)
        hidden = student.once(tokens, given)[row, now]
        law = torch.softmax(hidden.float() @ head.weight.float().T, dim=-1)
        drawn = head.name(torch.multinomial(law, 1, generator=generator)[:, 0])
        fits = cuts + step < tokens.shape[1] - 1
        tokens[row, now + 1] = torch.where(fits, drawn, tokens[row, now + 1])
        if given is not None:
            given[row, now] = torch.where(fits[:, None], hidden.to(given.dtype), given[row, now])
    return tokens
