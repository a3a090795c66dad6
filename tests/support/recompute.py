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
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))
