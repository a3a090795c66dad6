"""Logits without any cache, and how closely others must match them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def recomputed(model: Any, tokens: list[int]) -> Tensor:
    """Logits [n, V] of a plain forward without any cache."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def check(got: Tensor, want: Tensor) -> None:
    """Equal but for roundings: a float32 forward of these models is up to 2.3e-5 of the largest logit away from
    float64's, by an order of summation that the machine chooses, and two of them may differ by twice that."""
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5 * float(want.abs().max()))
