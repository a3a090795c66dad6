"""A sampler that is wrong on purpose, to see that the distribution test can say no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.types import Draft, DraftContext


@dataclass(frozen=True, slots=True)
class WrongLaw:
    """Says of every drafted token that it was certain, and of the whole law that it is nothing."""

    vocab_size: int

    def of(self, tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.float64)

    def at(self, position: Tensor) -> Tensor:
        return torch.zeros(len(position), self.vocab_size, dtype=torch.float64, device=position.device)


class WrongDrafter(Drafter):
    """Drafts one fixed token after the prompt. Its forged law has corrections drawn from p, not from what is left of p.

    That is the classic mistake of speculative sampling: the drafted token comes out with probability p + (1 - p) p.
    """

    def __init__(self, token: int, prompt_length: int) -> None:
        self.token, self.prompt_length = token, prompt_length

    def propose(self, context: DraftContext) -> Draft:
        first = [len(history) == self.prompt_length for history in context.histories]
        lengths = [int(begins and room > 0) for begins, room in zip(first, context.max_lengths, strict=True)]
        tokens = torch.full((len(lengths), 1), self.token, device=context.device)
        return Draft(tokens, torch.tensor(lengths, device=context.device), WrongLaw(context.vocab_size))

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


def most_telling(law: Tensor) -> tuple[int, float]:
    """The token for which the lie is largest, and how far it moves the law: p (1 - p), a total variation distance."""
    moved = law * (1 - law)
    token = int(moved.argmax())
    return token, float(moved[token])
