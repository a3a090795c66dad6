"""How far a result in float32 may lie from the exact one: roundings counted, half an ulp each.

Sums round once a term, in any order; where a compiler fuses products into sums there are fewer roundings, not more.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_ULP = 2.0**-24  # of a float32, relative to it


def of_scores(size: int, magnitude: float) -> float:
    """Absolute, of sums of `size` products whose magnitudes add up to `magnitude`; four more roundings for a factor, a
    bias or cap, and the peak that is taken away."""
    return (size + 4) * HALF_ULP * magnitude


def of_attention(query: Tensor, keys: Tensor, values: Tensor, factor: float, num_keys: int) -> float:
    """Absolute, of the mean of values [..., D'] by a softmax of `factor` times queries and keys [..., D].

    Weights move by twice what scores do, and by an exponential's three half ulps; they and the values are summed over
    `num_keys`. Keys and values that nobody looks at may be NaN.
    """
    lengths = [float(x.double().nan_to_num(0).norm(dim=-1).max()) for x in (query, keys)]
    largest = float(values.double().nan_to_num(0).abs().max())
    scores = of_scores(query.shape[-1], factor * lengths[0] * lengths[1])
    return largest * (2 * scores + (2 * num_keys + 8) * HALF_ULP)


def of_law(logits: Tensor, temperature: float = 1.0) -> float:
    """Relative, of a softmax of logits [.., V] by way of the log of their mass, which is summed in float64: rounded are
    the quotient by the temperature, that log, the distance to it, and twice its exponential."""
    largest = float(torch.where(logits.isfinite(), logits, 0.0).abs().max()) / temperature
    return (3 * (2 * largest + math.log(logits.shape[-1])) + 2) * HALF_ULP
