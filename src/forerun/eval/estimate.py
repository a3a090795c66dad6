"""Means with their confidence intervals, over examples, and paired differences of two decoders on the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist

import torch
from torch import Tensor

RESAMPLES = 10_000
CHUNK = 500
EXACT = 12
"""Up to so many examples that differ, every choice of signs is tried."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the interval that holds the true one as often as `confidence` says; None where n is too small."""

    value: float
    low: float | None
    high: float | None

    def holds(self, truth: float, tolerance: float = 0.0) -> bool | None:
        """Whether the interval reaches `truth`, give or take; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low - tolerance <= truth <= self.high + tolerance


@dataclass(frozen=True, slots=True)
class Paired:
    """Two decoders on the same examples: both figures, and the second less the first."""

    plain: Estimate
    speculative: Estimate
    difference: Estimate
    p_value: float | None  # of the paired sign-flip test; None where n is too small


def compare(
    plain: Sequence[float],
    speculative: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    exponential: bool = False,
    confidence: float = 0.95,
    difference_confidence: float | None = None,
    seed: int = 0,
) -> Paired:
    """Weighted means of both, their exponentials for perplexities, and the difference, example by example.

    Intervals come from a bootstrap over examples. Scores that are all 0 or 1 have intervals of their own (Wilson's, and
    Agresti and Min's for the difference): a bootstrap of twenty failures would be certain that nothing ever passes.
    """
    both = torch.tensor([list(plain), list(speculative)], dtype=torch.float64).T  # [n, 2]
    counts = torch.ones(len(plain), dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    wider = confidence if difference_confidence is None else difference_confidence
    shape = torch.exp if exponential else torch.Tensor.clone
    point = shape(_mean(both, counts))
    first, second = point.tolist()
    change = second - first
    p_value = sign_flip_test(((both[:, 1] - both[:, 0]) * counts).tolist(), seed=seed)
    if weights is None and not exponential and bool(((both == 0) | (both == 1)).all()):
        one, two = (wilson(column, confidence) for column in both.T.tolist())
        return Paired(one, two, agresti_min(both[:, 0].tolist(), both[:, 1].tolist(), wider), p_value)
    if len(plain) < 2:
        return Paired(Estimate(first, None, None), Estimate(second, None, None), Estimate(change, None, None), None)
    drawn, n = shape(_bootstrap(both, counts, seed)), len(plain)  # [R, 2]
    one, two = (_interval(drawn[:, i], point[i].item(), confidence, n) for i in (0, 1))
    return Paired(one, two, _interval(drawn[:, 1] - drawn[:, 0], change, wider, n), p_value)


def mean(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Of one decoder alone."""
    return compare(values, values, confidence=confidence, seed=seed).plain


def wilson(values: Sequence[float], confidence: float) -> Estimate:
    """Of a share of successes; honest for none and for all."""
    n, share = len(values), sum(values) / len(values)
    z = _normal(confidence)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding must not put the share itself outside.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def agresti_min(plain: Sequence[float], speculative: Sequence[float], confidence: float) -> Estimate:
    """Of the difference of paired shares: half a success and half a failure more in every cell."""
    n = len(plain)
    gained = sum(b > a for a, b in zip(plain, speculative, strict=True)) + 0.5
    lost = sum(b < a for a, b in zip(plain, speculative, strict=True)) + 0.5
    centre = (gained - lost) / (n + 2)
    half = _normal(confidence) * math.sqrt(gained + lost - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    return Estimate((gained - lost) / n, centre - half, centre + half)


def sign_flip_test(differences: Sequence[float], seed: int = 0) -> float | None:
    """Chance of a difference at least this large if each example's sign were a coin toss: equal decoders' p-value."""
    moved = torch.tensor([d for d in differences if d != 0], dtype=torch.float64)
    if len(differences) < 2:
        return None
    if not len(moved):
        return 1.0
    seen = moved.sum().abs().item() * (1 - 1e-12)  # sums in another order may differ in the last bit
    if len(moved) <= EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=len(moved))), dtype=torch.float64)
        return (signs @ moved).abs().ge(seen).double().mean().item()
    generator = torch.Generator().manual_seed(seed)
    hits = 0
    for _ in range(RESAMPLES // CHUNK):
        signs = torch.randint(0, 2, (CHUNK, len(moved)), generator=generator).double() * 2 - 1
        hits += int((signs @ moved).abs().ge(seen).sum())
    return (hits + 1) / (RESAMPLES + 1)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights[:, None]).sum(0) / weights.sum()


def _bootstrap(values: Tensor, weights: Tensor, seed: int) -> Tensor:
    """Weighted means [R, c] of examples drawn with replacement from [n, c]."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.cat([values * weights[:, None], weights[:, None]], dim=1)
    parts = []
    for _ in range(RESAMPLES // CHUNK):
        drawn = torch.randint(0, len(values), (CHUNK, len(values)), generator=generator)
        total = sums[drawn].sum(1)
        parts.append(total[:, :-1] / total[:, -1:])
    return torch.cat(parts)


def _interval(drawn: Tensor, point: float, confidence: float, n: int) -> Estimate:
    """Percentiles, wider by what few examples hide: resampling n of them underrates their spread, and knows it as
    surely as if there were many."""
    tail = (1 - confidence) / 2
    widen = math.sqrt(n / (n - 1)) * student(confidence, n - 1) / _normal(confidence)
    ends = torch.quantile(drawn, torch.tensor([tail, 1 - tail], dtype=drawn.dtype)).tolist()
    low, high = (point + (end - point) * widen for end in ends)
    return Estimate(point, low, high)


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def student(confidence: float, freedom: int) -> float:
    """Student's t in the place of `_normal`: closed for 1 and 2 degrees of freedom, else its series in 1 / freedom,
    less than 1 % off."""
    p = 0.5 + confidence / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = _normal(confidence)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
