"""The draft lengths that give a batch the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.policy.worth import Worth

SMALLEST = 0.01  # chances smaller than this never pay and only take time to consider
MARGIN = 1.02  # drafting must beat plain decoding by this factor: estimates are noisy, and plain decoding is safe
EVEN = Worth()
Token = tuple[float, int, int]  # its chance, negative; place in the draft; row
MOST_ENDS = 8  # times at which rows end that are told apart
LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)  # longest drafts that are compared; between them the rate is nearly flat


def best_lengths(
    survival: Sequence[Sequence[float]],  # [B][up to the row's room]: chance that tokens 1..i are all kept
    score: Sequence[float],  # seconds to score with 0, 1, ... drafted tokens in all
    draft: Sequence[float],  # seconds to draft with a longest draft of 0, 1, ... tokens
    spoken: float = 1.0,  # how often the drafter has anything to say when asked
    margin: float = MARGIN,
    worth: Worth = EVEN,
) -> tuple[int, ...]:
    """Lengths that maximise expected tokens per second, all 0 where plain decoding is best.

    A token further down a draft is never likelier to survive than the one before. So for a given longest draft the best
    `m` tokens of the batch are the first `m` in order of survival, and only `m` has to be searched. Where tokens of
    some rows are worth more, their order is that of both together.
    """
    rows, plain = len(survival), score[0]
    weights = worth.weights(rows)
    order = sorted(
        (-chance * weights[row], place, row)
        for row, chances in enumerate(survival)
        for place, chance in enumerate(chances)
        if chance * weights[row] > SMALLEST
    )
    best: Sequence[Token] = []
    best_rate = margin * rows / plain
    for longest in _longest_worth_trying(order, draft):
        within = [token for token in order if token[1] < longest]
        fixed = draft[longest] + (1 - spoken) * plain
        gained = worth.expected_along(((row, survival[row][place]) for _, place, row in within), rows)
        rates = [
            (rows + spoken * more) / (fixed + spoken * took) for more, took in zip(gained, score[1:], strict=False)
        ]
        if rates and max(rates) > best_rate:
            best_rate = max(rates)
            best = within[: rates.index(best_rate) + 1]
    lengths = [0] * rows
    for _, _, row in best:
        lengths[row] += 1
    return tuple(lengths)


def best_size(
    survival: Sequence[Sequence[float]],
    score: Sequence[float],
    draft: Sequence[float],
    sizes: Sequence[int],
    margin: float = MARGIN,
) -> tuple[int, ...]:
    """The same where a round takes as long as its longest draft, whatever the others have: one of `sizes` for all."""
    rows, best = len(survival), 0
    best_rate = margin * rows / score[0]
    for size in sizes:
        if size >= len(draft) or rows * size >= len(score):  # further than anybody has looked
            break
        gained = sum(sum(chances[:size]) for chances in survival)
        rate = (rows + gained) / (draft[size] + score[rows * size])
        if rate > best_rate:
            best, best_rate = size, rate
    return tuple(min(best, len(chances)) for chances in survival)


@dataclass(frozen=True, slots=True)
class RoundPrices:
    """What rounds of one batch take."""

    score: Sequence[float]  # seconds to score with 0, 1, ... drafted tokens in all
    draft: Sequence[float]  # seconds to draw drafts of at most 0, 1, ... tokens
    sizes: Sequence[int]  # lengths that rounds are recorded for, where all rows run with one; else empty

    def of(self, lengths: Sequence[int], longest_drawn: int) -> float:
        """Seconds of a round with such drafts; infinity where that is further than anybody has looked."""
        run = sum(lengths)
        if self.sizes:
            longest = max(lengths)
            run = len(lengths) * next((size for size in self.sizes if size >= longest), longest)
        return self.draft[longest_drawn] + self.score[run] if run < len(self.score) else math.inf


def best_copies(
    copies: Sequence[Sequence[float]],  # [B][length of the row's copy]: chance that tokens 1..i are all kept
    drawn: Sequence[int],  # [B] what is drawn for a row that does not copy
    others: Sequence[float],  # [B] how much of that is expected to be kept
    prices: RoundPrices,
    margin: float = MARGIN,
    worth: Worth = EVEN,
) -> tuple[int, ...]:
    """How much of each copy to verify for the most tokens per second; 0 for rows that are better off without it."""
    rows = len(copies)
    best = (0,) * rows
    best_rate = margin * (rows + worth.expected(others)) / prices.of(drawn, max(drawn))
    for size in prices.sizes or LADDER:
        for takers in _takers(copies, worth):
            lengths, left, kept = [0] * rows, list(drawn), list(others)
            for row in takers:
                expected = sum(copies[row][:size])
                if expected >= others[row]:  # a copy is there already, a drawn draft costs time
                    lengths[row], left[row], kept[row] = min(size, len(copies[row])), 0, expected
            rate = (rows + worth.expected(kept)) / prices.of(list(map(max, lengths, left)), max(left))
            if any(lengths) and rate > best_rate:
                best, best_rate = tuple(lengths), rate
        if size >= max(map(len, copies)):
            break
    return best


def _takers(copies: Sequence[Sequence[float]], worth: Worth) -> list[list[int]]:
    """Rows that may copy: all; where rows end at different times, also the slowest alone, with the next slowest, ...,
    but not every number of rows: choosing must not take longer than it saves."""
    rows = [row for row, chances in enumerate(copies) if chances]
    ends = sorted({worth.tokens_left[row] for row in rows}, reverse=True) if worth.tokens_left else [0]
    ends = [*ends[: MOST_ENDS - 1], ends[-1]] if len(ends) > MOST_ENDS else ends
    return [[row for row in rows if not worth.tokens_left or worth.tokens_left[row] >= end] for end in ends]


def _longest_worth_trying(order: Sequence[Token], draft: Sequence[float]) -> Sequence[int]:
    """Every length up to 6 and a few beyond; the deepest alone where drafting is free."""
    deepest = max((place for _, place, _ in order), default=-1) + 1
    if draft[deepest] == 0:
        return (deepest,)
    return [*(longest for longest in LADDER if longest < deepest), deepest]
