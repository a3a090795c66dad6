"""From what was counted and timed to what each draft length will give: by Leviathan's formulas, and by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from forerun.math.theory import expected_tokens, operations_factor, walltime_factor
from forerun.plan.acceptance import Acceptance, Trace
from forerun.plan.costs import RoundCosts

NOTHING_GAINED = 1.02  # a factor below this is within what timings differ by from day to day: not worth a drafter


@dataclass(frozen=True, slots=True)
class Formula:
    """Leviathan's formulas: one alpha for all tokens, one c, and a whole draft scored for the price of one token."""

    tokens_per_round: float
    factor: float  # times as fast as plain decoding
    operations: float  # times as much arithmetic per token


@dataclass(frozen=True, slots=True)
class Prediction:
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
    """Rounds of a batch, added up."""

    rounds: float
    tokens: float
    seconds: float
    scored: float
    drawn: float


def predict(
    acceptance: Acceptance, costs: RoundCosts, lengths: Sequence[int], operations_ratio: float
) -> list[Prediction]:
    """For plain decoding (length 0) and each of `lengths`. `operations_ratio`: a draft step over a target step."""
    known = {length: _per_round(_replay(trace, costs)) for length, trace in acceptance.traces.items()}
    alpha = acceptance.alpha
    plain_rate = costs.batch / costs.plain
    found = [_plain(costs, plain_rate)]
    for length in lengths:
        replay = known.get(length) or _between(acceptance, costs, length)
        rate = replay.tokens / replay.seconds
        formula = Formula(
            tokens_per_round=expected_tokens(alpha, length),
            factor=walltime_factor(alpha, length, costs.draft_ratio(length)),
            operations=operations_factor(alpha, length, operations_ratio),
        )
        found.append(
            Prediction(
                length=length,
                tokens_per_round=replay.tokens / costs.batch,
                seconds_per_round=replay.seconds,
                tokens_per_second=rate,
                factor=rate / plain_rate,
                operations=(replay.scored + operations_ratio * replay.drawn) / replay.tokens,
                counted=length in known,
                formula=formula,
            )
        )
    return found


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest, the shortest among equals; plain decoding unless something beats it by more than nothing."""
    top = max(predictions, key=lambda p: (p.factor, -p.length))
    return top if top.factor > NOTHING_GAINED else predictions[0]


def _plain(costs: RoundCosts, rate: float) -> Prediction:
    return Prediction(0, 1.0, costs.plain, rate, 1.0, 1.0, True, Formula(1.0, 1.0, 1.0))


def _replay(trace: Trace, costs: RoundCosts) -> _Replay:
    """The counted rounds again, put together into batches and priced; a batch is over when its first row is."""
    rows = list(trace.rows.values())
    rounds = tokens = seconds = scored = drawn = 0.0
    for start in range(0, len(rows) - costs.batch + 1, costs.batch):
        for turns in zip(*rows[start : start + costs.batch], strict=False):
            drafted = sum(turn.drafted for turn in turns)
            drafts = [turn.drafted for turn in turns if not turn.copied]
            rounds += 1
            tokens += len(turns) + sum(turn.accepted for turn in turns)
            scored += len(turns) + drafted
            drawn += sum(drafts)
            seconds += costs.of_round(drafted, max(drafts, default=0))
    return _Replay(rounds, tokens, seconds, scored, drawn)


def _per_round(total: _Replay) -> _Replay:
    n = max(total.rounds, 1.0)
    return _Replay(1.0, total.tokens / n, total.seconds / n, total.scored / n, total.drawn / n)


def _between(acceptance: Acceptance, costs: RoundCosts, length: int) -> _Replay:
    """The next longer trace cut to `length`, for the shape; its error at the next shorter one, where it is known, is
    taken off in proportion."""
    low, high = next((a, b) for a, b in pairwise(sorted(acceptance.traces)) if a < length < b)
    longer = acceptance.traces[high]

    def rate(trace: Trace) -> float:
        return _per_round(_replay(trace, costs)).tokens

    found = _per_round(_replay(longer.cut(length), costs))
    error = rate(acceptance.traces[low]) / rate(longer.cut(low)) - 1
    return replace(found, tokens=found.tokens * (1 + error * (high - length) / (high - low)))
