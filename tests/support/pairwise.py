"""A short list of cases in which any two values of any two settings meet at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairwise_cases(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Greedy and deterministic: each case begins with a pair still missing and is filled up with what covers most."""
    missing = dict.fromkeys(
        (a, x, b, y) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]
    )  # fmt: skip
    uses: dict[tuple[str, Any], int] = {}
    cases = []
    while missing:
        a, x, b, y = next(iter(missing))
        case: Case = {a: x, b: y}
        for name in factors:
            if name not in case:
                case[name] = _best(name, factors, case, missing, uses)
        case = {name: case[name] for name in factors}
        for pair in pairs_of(case):
            missing.pop(pair, None)
        for item in case.items():
            uses[item] = uses.get(item, 0) + 1
        cases.append(case)
    return cases


def pairs_of(case: Mapping[str, Any]) -> list[Pair]:
    """All pairs of settings a case holds, names in the case's order."""
    return [(a, case[a], b, case[b]) for a, b in combinations(case, 2)]


def _best(
    name: str, factors: Mapping[str, Sequence[Any]], case: Case, missing: Mapping[Pair, None], uses: Mapping[Any, int]
) -> Any:
    """The value that covers most missing pairs with what is chosen so far; the least used among equals."""
    order = list(factors)

    def gain(value: Any) -> int:
        ordered = {n: {**case, name: value}[n] for n in order if n in case or n == name}
        return sum(pair in missing for pair in pairs_of(ordered) if name in (pair[0], pair[2]))

    return max(factors[name], key=lambda value: (gain(value), -uses.get((name, value), 0)))
