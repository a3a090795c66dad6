"""Recording ahead of time every round that rows, drafts and contexts up to given sizes can meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from forerun.config import SamplingParams
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import POSITIONS, SMALLEST_KEY_BOUND, key_bound, next_power_of_two
from forerun.engine.row import Row

# Batches of one of these kinds have recordings of their own; all others share one that suits every kind.
KINDS = (SamplingParams(temperature=1.0), SamplingParams())

Report = Callable[[int, int], None]
"""Told how many rounds have been recorded, and how many there are."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was done ahead of time."""

    seconds: float
    num_rounds: int  # that were recorded; 0 where nothing can be
    remark: str = ""  # why nothing was recorded


def sizes_up_to(rows: int) -> list[int]:
    """Of row tables, the largest first: scratch memory is then as large as it gets before anything is recorded."""
    return [1 << exponent for exponent in reversed(range(next_power_of_two(rows).bit_length()))]


def bounds_up_to(context: int) -> list[int]:
    """On the keys of a row, the largest first; a round under way as a row ends may write past its end."""
    most = key_bound(context + 2 * POSITIONS[-1])
    bounds = [most]
    while bounds[-1] > SMALLEST_KEY_BOUND:
        bounds.append(bounds[-1] // 2)
    return bounds


def record_all(
    runner: Runner, rows: int, lengths: Sequence[int], context: int, likes: Sequence[Row], report: Report | None
) -> int:
    """All rounds of up to `rows` rows with drafts of `lengths` tokens; returns how many there are.

    `likes` are rows, one of each kind; the first also stands for all kinds at once.
    """
    bounds, kinds = bounds_up_to(context), [(likes[0], True), *((like, False) for like in likes)]
    runner.expect(bounds[0], lengths)
    plan = [
        (size, number, bound, like, for_all)
        for size, number in product(sizes_up_to(rows), sorted({0, *lengths}, reverse=True))
        for like, for_all in kinds
        for bound in (bounds if for_all else bounds[:1])  # the target's pass is the same for all kinds
    ]
    for place, (size, number, bound, like, for_all) in enumerate(plan):
        runner.prepare(size, number, bound, like, for_all=for_all, is_given=number > 0 and not runner.drafts)
        if report is not None:
            report(place + 1, len(plan))
    return len(plan)
