"""The draft of one who has nothing to say: plain decoding is a round with it."""

from __future__ import annotations

import torch

from forerun.math.laws import PointMass
from forerun.types import Draft


def silent(num_rows: int, vocab_size: int, device: torch.device) -> Draft:
    tokens = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
    return Draft(tokens, lengths, PointMass(tokens, vocab_size), deterministic=True)
