"""Pearson's test of counts against a known law, its power, and room for logits that are not quite the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_EXPECTED = 10.0  # a cell holds so many samples on average: 5 is usual, but the far tail is used here
POWER = 0.9


@dataclass(frozen=True, slots=True)
class Fit:
    """How well counts agree with a law."""

    samples: int
    cells: int
    statistic: float | None  # None where a token came out that the law forbids
    shift: float  # noncentrality that rounding alone may cause
    p_value: float  # upper bound of the chance to see so much disagreement if the law is right

    @property
    def freedom(self) -> int:
        return self.cells - 1


def fit(counts: Mapping[int, int], law: Tensor, slack: float = 0.0, doubtful: frozenset[int] = frozenset()) -> Fit:
    """Compare counts of tokens with their law [V]. Rare tokens share a cell.

    `slack` is the relative error each probability may have by rounding. `doubtful` tokens may or may not belong to the
    law (the edge of a truncation): they share the cell of the rare ones. A token the law forbids fails at once.
    """
    total = sum(counts.values())
    expected = {t: float(law[t]) * total for t in law.nonzero().flatten().tolist()}
    if any(token not in expected and token not in doubtful for token in counts):
        return Fit(total, len(expected), None, 0.0, 0.0)
    frequent = [t for t, mean in expected.items() if mean >= LEAST_EXPECTED and t not in doubtful]
    cells = [(expected[t], counts.get(t, 0)) for t in frequent]
    cells = _with_rest(cells, total)
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in cells)
    shift = total * slack**2
    p_value = survival(statistic, len(cells) - 1, shift) if len(cells) > 1 else 1.0
    return Fit(total, len(cells), statistic, shift, p_value)


def _with_rest(cells: list[tuple[float, int]], total: int) -> list[tuple[float, int]]:
    """Add what no cell holds; too little to stand alone, it joins the smallest cell."""
    mean = total - sum(cell[0] for cell in cells)
    seen = total - sum(cell[1] for cell in cells)
    if mean >= LEAST_EXPECTED or not cells:
        return [*cells, (mean, seen)]
    *larger, smallest = sorted(cells, reverse=True)
    return [*larger, (smallest[0] + mean, smallest[1] + seen)]


def survival(statistic: float, freedom: int, shift: float = 0.0) -> float:
    """Chance that a (noncentral, by `shift`) chi-square variable of `freedom` degrees exceeds `statistic`."""
    if shift == 0:
        return float(_central(statistic, torch.tensor(freedom / 2)))
    reach = 12 * math.sqrt(shift / 2) + 30  # what lies further from the mean weighs less than 1e-30, on both sides
    terms = torch.arange(max(int(shift / 2 - reach), 0), int(shift / 2 + reach), dtype=torch.float64)
    log_weight = terms * math.log(shift / 2) - shift / 2 - torch.lgamma(terms + 1)
    return float((log_weight.exp() * _central(statistic, freedom / 2 + terms)).sum())


def _central(statistic: float, half_freedom: Tensor) -> Tensor:
    tail: Tensor = torch.special.gammaincc(half_freedom.double(), torch.tensor(statistic / 2, dtype=torch.float64))
    return tail


def detectable(samples: int, freedom: int, level: float, shift: float = 0.0) -> float:
    """The total variation distance that a test at `level` finds with chance `POWER`, whatever form it takes.

    Of all laws at distance d, the one hardest to see still has noncentrality 4 d^2 for each sample (Cauchy-Schwarz).
    """
    limit = _solve(lambda x: survival(x, freedom, shift) < level)
    return min(1.0, math.sqrt(_solve(lambda x: survival(limit, freedom, x) > POWER) / (4 * samples)))


def _solve(reached: Callable[[float], bool]) -> float:
    """The smallest x > 0 at which a condition that stays true becomes true."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
