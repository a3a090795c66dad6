"""The target's head: the draft's logits on the tokens it can say, and the target's own law there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.math.losses import TeacherLaw


class SharedHead:
    """The target's head and, where the draft's vocabulary is reduced, the rows of it that the draft uses.

    Logits are made in float32 whatever the models run in: bfloat16 cannot tell logits of 20 apart that differ by 0.1.
    """

    def __init__(self, target_head: nn.Linear, tokens: Tensor | None, own: nn.Linear | None = None) -> None:
        self.full = target_head.weight.detach().float()  # [V, H]
        self.tokens = tokens  # [Vd] int64, ascending; None where the draft can say everything
        self.own = own  # the draft's, where it has one and trains it
        self.narrow = self.full if tokens is None else self.full[tokens]  # [Vd, H]

    @property
    def weight(self) -> Tensor:
        """What the draft's hidden states are multiplied with, [Vd, H]."""
        return self.narrow if self.own is None else self.own.weight

    @torch.no_grad()
    def law(self, features: Tensor) -> TeacherLaw:
        """The target's law after positions with these features: [N, H] -> N laws."""
        features = features.float()
        logits = features @ self.full.T
        narrow = logits if self.tokens is None else features @ self.narrow.T
        return TeacherLaw.from_logits(narrow, torch.logsumexp(logits, dim=-1))

    def name(self, drawn: Tensor) -> Tensor:
        """From places in the draft's vocabulary to token ids."""
        return drawn if self.tokens is None else self.tokens[drawn]
