"""Where a test of a uniform turns, found from outside: whatever a rule does is measured, a broken one's too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def bisect(holds: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """The length of [0, h) on which `holds` is true, for every row; `holds` turns from true to false once."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for _ in range(47):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return torch.where(high == 1, high, low)
