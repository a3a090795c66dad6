"""What the references of attention and of log-probabilities compute in: float32, except that float64 stays.

A model in float64 is how two ways of running it are told apart from two roundings: nothing may round it to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def working(values: Tensor) -> Tensor:
    """The same in the dtype that the mathematics is done in."""
    return values if values.dtype == torch.float64 else values.float()
