"""From what was counted and timed to what each draft length will give: by Leviathan's formulas, and by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from forerun.math.theory import expected_tokens, operations_factor, walltime_factor
from forerun.plan.acceptance import AcceptanceTrace, CountedAcceptance
from forerun.plan.costs import RoundCosts

NOTHING_GAINED = 1.02  # a factor below this is within what timings differ by from day to day: not worth a drafter


@dataclass(frozen=True, slots=True)
class Formula:
    """Leviathan's formulas: one alpha for all tokens, one c, and a whole draft scored for the price of one token."""

    tokens_per_round: float
    factor: float  # times as fast as plain decoding
    operations: float  # times as much arithmetic per token


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """One draft length at one batch size and temperature, rounds with every row in flight."""

    length: int
    tokens_per_round: float  # of each row
    seconds_per_round: float
    tokens_per_second: float  # of the whole batch
    factor: float  # times as fast as plain decoding
    operations: float  # times as much arithmetic per token
    counted: bool  # acceptance was counted at this very length, not taken from its neighbours
    formula: Formula


@dataclass(frozen=True, slots=True)
class _Replay:
    """The mean round of a batch."""

    tokens: float
    seconds: float
    scored: float
    drawn: float


def predict(
    acceptance: CountedAcceptance, costs: RoundCosts, lengths: Sequence[int], operations_ratio: float
) -> list[LengthPrediction]:
    """For plain decoding (length 0) and each of `lengths`. `operations_ratio`: a draft step over a target step."""
    alpha = acceptance.alpha
    plain_rate = costs.batch / costs.plain
    predictions = [LengthPrediction(0, 1.0, costs.plain, plain_rate, 1.0, 1.0, True, Formula(1.0, 1.0, 1.0))]
    for length in lengths:
        trace = acceptance.traces.get(length)
        replay = _between(acceptance, costs, length) if trace is None else _replay(trace, costs)
        rate = replay.tokens / replay.seconds
        formula = Formula(
            tokens_per_round=expected_tokens(alpha, length),
            factor=walltime_factor(alpha, length, costs.draft_ratio(length)),
            operations=operations_factor(alpha, length, operations_ratio),
        )
        predictions.append(
            LengthPrediction(
                length=length,
                tokens_per_round=replay.tokens / costs.batch,
                seconds_per_round=replay.seconds,
                tokens_per_second=rate,
                factor=rate / plain_rate,
                operations=(replay.scored + operations_ratio * replay.drawn) / replay.tokens,
                counted=trace is not None,
                formula=formula,
            )
        )
    return predictions


def best(predictions: Sequence[LengthPrediction]) -> LengthPrediction:
    """The fastest, the shortest among equals; plain decoding unless something beats it by more than nothing."""
    top = max(predictions, key=lambda p: (p.factor, -p.length))
    return top if top.factor > NOTHING_GAINED else predictions[0]


def _replay(trace: AcceptanceTrace, costs: RoundCosts) -> _Replay:
    """The counted rounds again, put together into batches and priced; a batch is over when its first row is."""
    rows = list(trace.rows.values())
    num_rounds = tokens = scored = drawn = 0
    seconds = 0.0
    for start in range(0, len(rows) - costs.batch + 1, costs.batch):
        for rounds in zip(*rows[start : start + costs.batch], strict=False):
            drafted = sum(r.drafted for r in rounds)
            drawn_lengths = [r.drafted for r in rounds if not r.copied]
            num_rounds += 1
            tokens += len(rounds) + sum(r.accepted for r in rounds)
            scored += len(rounds) + drafted
            drawn += sum(drawn_lengths)
            seconds += costs.of_round(drafted, max(drawn_lengths, default=0))
    n = max(num_rounds, 1)
    return _Replay(tokens / n, seconds / n, scored / n, drawn / n)


def _between(acceptance: CountedAcceptance, costs: RoundCosts, length: int) -> _Replay:
    """The next longer trace cut to `length`, for the shape; its error at the next shorter one, where it is known, is
    taken off in proportion."""
    low, high = next((a, b) for a, b in pairwise(sorted(acceptance.traces)) if a < length < b)
    longer = acceptance.traces[high]
    replay = _replay(longer.cut(length), costs)
    error = _replay(acceptance.traces[low], costs).tokens / _replay(longer.cut(low), costs).tokens - 1
    return replace(replay, tokens=replay.tokens * (1 + error * (high - length) / (high - low)))
