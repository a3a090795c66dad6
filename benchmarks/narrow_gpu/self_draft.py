"""A target's own weights as its draft, with an acceptance rate that is dialled in."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.bench.synthetic import SIZES, engrave_head, make_bigram_law, noise_for, parse
from forerun.drafters import SelfDraft

ALPHAS = {8: 0.97, 4: 0.92}  # by bits: what copies of large models are like


class DialledSelfDraft(SelfDraft):
    """A copy of a synthetic target whose head reads the next token a little wrongly.

    Random weights write next to nothing to the residual stream, so rounding them alone would change no token.
    """

    def __init__(self, bits: int, pair: str, seed: int = 0) -> None:
        super().__init__(bits)
        self.size, self.seed = SIZES[parse(pair).target], seed

    def made_of(self, target: PreTrainedModel) -> PreTrainedModel:
        model = super().made_of(target)
        law = make_bigram_law(self.size.vocab, self.size.code, self.seed, target.device)
        noise, _ = noise_for(law, ALPHAS[self.bits], self.seed)
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        engrave_head(head.weight, self.size, law, noise)
        return model
