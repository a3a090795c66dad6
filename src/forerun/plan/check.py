"""The prediction put to the test: draft lengths are run in turns, with other random numbers, and timed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from forerun.plan.predict import LengthPrediction
from forerun.plan.rounds import PromptBatch, RoundRunner, TimedRound, full_rounds
from forerun.plan.settings import CheckedLengths

REACH = 2  # lengths on either side of the predicted best that are run
SPEED_TOLERANCE = 0.10
TIE = 0.03  # speeds this close are one speed: so much they differ between runs of the same thing
PLAIN_ROUNDS = 32
SURE = 2.0  # standard errors that sampled text may differ by, on top


@dataclass(frozen=True, slots=True)
class LengthRun:
    """One draft length as it ran."""

    length: int
    rounds: int
    tokens: int
    seconds: float
    factor: float  # times as fast as plain decoding in the same run
    error: float  # one standard error of the speed, as a share of it

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """Whether the prediction held."""

    predicted_length: int
    measured_length: int  # the fastest of those that were run
    predicted_factor: float  # of the predicted length
    measured_factor: float  # of the same
    best_factor: float  # of the fastest
    tie: float  # what counted as the same speed
    predicted_speed: float  # tokens per second, of the predicted length
    measured_speed: float

    @property
    def factor_error(self) -> float:
        return self.predicted_factor / self.measured_factor - 1

    @property
    def speed_error(self) -> float:
        return self.predicted_speed / self.measured_speed - 1

    @property
    def is_tie(self) -> bool:
        """Whether the predicted length is as fast as the fastest, but for noise."""
        return self.measured_factor >= self.best_factor * (1 - self.tie)

    @property
    def length_held(self) -> bool:
        """Within one of the fastest, or as fast. No draft at all is near to no draft length."""
        drafts = self.predicted_length > 0 and self.measured_length > 0
        return self.is_tie or (drafts and abs(self.predicted_length - self.measured_length) <= 1)

    @property
    def speed_held(self) -> bool:
        return abs(self.factor_error) <= SPEED_TOLERANCE

    @property
    def held(self) -> bool:
        return self.length_held and self.speed_held


def lengths_to_run(best: int, max_length: int, checked: CheckedLengths) -> list[int]:
    """Plain decoding always; around a prediction that nothing pays, the shortest drafts."""
    if checked is CheckedLengths.NONE:
        return []
    reach = max_length if checked is CheckedLengths.ALL else REACH
    return [0, *(n for n in range(1, max_length + 1) if abs(n - best) <= reach)]


def run_lengths(
    plain: RoundRunner,
    runner: RoundRunner,
    batches: Sequence[PromptBatch],
    lengths: Sequence[int],
    seed: int = 0,
) -> list[LengthRun]:
    """Every length on a batch of prompts, in random order, before the next batch: drift hits all alike."""
    rng = random.Random(seed)
    rounds: dict[int, list[TimedRound]] = {length: [] for length in lengths}
    for batch in batches:
        for length in rng.sample(list(lengths), len(lengths)):
            rounds[length] += _run(runner if length else plain, batch, length)
    plain_rate = _rate(rounds[0])
    error = _luck if any(batch.temperature for batch in batches) else _jitter
    return [
        LengthRun(
            length,
            rounds=len(timed),
            tokens=sum(r.tokens for r in timed),
            seconds=sum(r.seconds for r in timed),
            factor=_rate(timed) / plain_rate,
            error=error(timed),
        )
        for length, timed in rounds.items()
    ]


def compare_with_runs(best: LengthPrediction, checked: Sequence[LengthRun]) -> PlanVerdict:
    """`checked` holds plain decoding and the predicted best."""
    predicted = next(entry for entry in checked if entry.length == best.length)
    fastest = max(checked, key=lambda entry: (entry.factor, -entry.length))
    noise = (predicted.error**2 + fastest.error**2) ** 0.5 if predicted is not fastest else 0.0
    return PlanVerdict(
        predicted_length=best.length,
        measured_length=fastest.length,
        predicted_factor=best.factor,
        measured_factor=predicted.factor,
        best_factor=fastest.factor,
        tie=max(TIE, SURE * noise),
        predicted_speed=best.tokens_per_second,
        measured_speed=predicted.tokens_per_second,
    )


def _run(runner: RoundRunner, batch: PromptBatch, length: int) -> list[TimedRound]:
    """Plain rounds are all alike, and so slow that a few of them must do."""
    rounds = full_rounds(runner, batch, lambda: length)
    timed = list(rounds if length else islice(rounds, PLAIN_ROUNDS))
    rounds.close()
    return timed


def _rate(rounds: Sequence[TimedRound]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def _luck(rounds: Sequence[TimedRound]) -> float:
    """Sampled text: the error of a ratio of sums over rounds that are taken to be independent."""
    rate = _rate(rounds)
    spread: float = sum((r.tokens - rate * r.seconds) ** 2 for r in rounds) ** 0.5
    return spread / sum(r.tokens for r in rounds)


def _jitter(rounds: Sequence[TimedRound]) -> float:
    """Greedy text is the same in every run: only its times differ."""
    mean = fmean(r.seconds for r in rounds)
    spread: float = sum((r.seconds - mean) ** 2 for r in rounds) ** 0.5
    return spread / (mean * len(rounds))
