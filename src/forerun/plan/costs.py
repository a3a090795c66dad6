"""What rounds cost on this machine: whole rounds as the engine pays for them, timed in turns with plain ones."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from forerun.errors import InvalidArgument
from forerun.plan.rounds import PromptBatch, RoundRunner, TimedRound, full_rounds

BINS = 12  # points of a curve where drafts have many different sizes


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over something counted; straight between its points and beyond them, and never falling."""

    points: tuple[tuple[float, float], ...]  # x increasing

    @classmethod
    def through(cls, samples: Sequence[tuple[float, float]]) -> Curve:
        """Means of the samples with the same x, or of neighbours where there are many different ones."""
        by_x: dict[float, list[float]] = {}
        for x, seconds in samples:
            by_x.setdefault(x, []).append(seconds)
        return cls(tuple(_rising(_merged([(x, by_x[x]) for x in sorted(by_x)]))))

    def __call__(self, x: float) -> float:
        if len(self.points) < 2:
            return self.points[0][1] if self.points else 0.0
        place = min(max(bisect_left(self.points, (x,)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[place - 1], self.points[place]
        return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Of one drafter at one batch size, temperature and range of contexts."""

    drafter: str
    batch: int
    temperature: float
    context: int  # keys of a row, on average
    own_prompts: bool  # whether these are the prompts' own lengths, which predictions are made for
    plain: float  # seconds of a round without a drafter
    draft: Curve  # seconds to draft, by the longest draft that was drawn rather than copied
    rest: Curve  # seconds of everything else, by the tokens drafted in all rows together
    whole: Mapping[int, float]  # seconds of a round, by the draft length that was asked for

    def of_round(self, total_drafted: int, longest_drawn: int) -> float:
        return self.draft(longest_drawn) + self.rest(total_drafted)

    def draft_ratio(self, length: int) -> float:
        """Leviathan's c at this draft length: one draft step over one target step."""
        return self.draft(length) / length / self.plain

    def score_ratio(self, length: int) -> float:
        """Scoring and verifying full drafts over a plain step; 1 is what Leviathan's formula assumes."""
        return self.rest(length * self.batch) / self.plain

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it; ratios and seconds of a round by draft length."""
        return {
            "drafter": self.drafter,
            "batch": self.batch,
            "temperature": self.temperature,
            "context": self.context,
            "own_prompts": self.own_prompts,
            "plain_seconds": self.plain,
            "round_seconds": dict(self.whole),
            "draft_ratio": {length: self.draft_ratio(length) for length in self.whole},
            "score_ratio": {length: self.score_ratio(length) for length in self.whole},
        }


def measure_costs(
    plain: RoundRunner,
    runners: Sequence[RoundRunner],
    batches: Sequence[PromptBatch],
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
    own_prompts: bool = True,
) -> dict[str, RoundCosts]:
    """By drafter. One plain round, one of every drafter, and again: a machine that slows down slows all alike.

    Draft lengths come in a new random order every time through them. The first time through is a warm-up.
    """
    rng = random.Random(seed)
    streams = {runner.name: _Stream(runner, batches, lengths, rng) for runner in runners}
    steps = _endless(plain, batches, lambda: 0)
    plain_seconds: list[float] = []
    rounds: dict[str, list[tuple[int, TimedRound]]] = {name: [] for name in streams}
    for number in range((1 + repeats) * len(lengths)):
        plain_round = next(steps)
        samples = {name: stream.next() for name, stream in streams.items()}
        if number >= len(lengths):
            plain_seconds.append(plain_round.seconds)
            for name, sample in samples.items():
                rounds[name].append(sample)
    for source in (steps, *(stream.steps for stream in streams.values())):
        source.close()
    plain_mean = steady(plain_seconds)
    return {name: _costs(name, batches, plain_mean, timed, own_prompts) for name, timed in rounds.items()}


def steady(values: Sequence[float]) -> float:
    """The mean of the middle half: hiccups, and the first of a shape, are among the rest."""
    quarter = len(values) // 4
    return fmean(sorted(values)[quarter : len(values) - quarter])


def _costs(
    drafter: str,
    batches: Sequence[PromptBatch],
    plain: float,
    rounds: Sequence[tuple[int, TimedRound]],
    own_prompts: bool,
) -> RoundCosts:
    by_length: dict[int, list[float]] = {}
    for length, timed in rounds:
        by_length.setdefault(length, []).append(timed.seconds)
    mean_prompt = fmean(len(prompt) for batch in batches for prompt in batch.prompts)
    return RoundCosts(
        drafter=drafter,
        batch=batches[0].size,
        temperature=batches[0].temperature,
        context=round(mean_prompt + batches[0].new_tokens / 2),
        own_prompts=own_prompts,
        plain=plain,
        draft=Curve.through([(timed.longest_drawn, timed.draft_seconds) for _, timed in rounds]),
        rest=Curve.through([(timed.total_drafted, timed.seconds - timed.draft_seconds) for _, timed in rounds]),
        whole={length: steady(seconds) for length, seconds in sorted(by_length.items())},
    )


class _Stream:
    """Rounds of one drafter for ever, with the length that was asked for in each."""

    def __init__(
        self, runner: RoundRunner, batches: Sequence[PromptBatch], lengths: Sequence[int], rng: random.Random
    ) -> None:
        self.order = _shuffled(lengths, rng)
        self.length = 0
        self.steps = _endless(runner, batches, self.choose)

    def choose(self) -> int:
        self.length = next(self.order)
        return self.length

    def next(self) -> tuple[int, TimedRound]:
        timed = next(self.steps)
        return self.length, timed


def _endless(
    runner: RoundRunner, batches: Sequence[PromptBatch], choose: Callable[[], int]
) -> Generator[TimedRound, None, None]:
    """Round after round, batch after batch; an error where no batch has a round, which would be looked for for ever."""
    while True:
        has_rounds = False
        for batch in batches:
            with closing(full_rounds(runner, batch, choose)) as rounds:  # Python 3.12 leaves it open with this one
                for timed in rounds:
                    has_rounds = True
                    yield timed
        if not has_rounds:
            raise InvalidArgument(
                f"{runner.name}: texts of {batches[0].new_tokens} tokens are over before a round can be timed; raise "
                "max_new_tokens"
            )


def _shuffled(lengths: Sequence[int], rng: random.Random) -> Iterator[int]:
    while True:
        yield from rng.sample(lengths, len(lengths))


def _merged(groups: Sequence[tuple[float, list[float]]]) -> list[tuple[float, list[float]]]:
    """At most about `BINS` groups; neighbours are put together by count, and their x is the mean of theirs."""
    if len(groups) <= BINS:
        return list(groups)
    size = sum(len(values) for _, values in groups) / BINS
    merged: list[tuple[float, list[float]]] = []
    for x, values in groups:
        if not merged or len(merged[-1][1]) >= size:
            merged.append((x, values))
            continue
        before, kept = merged.pop()
        merged.append(((before * len(kept) + x * len(values)) / (len(kept) + len(values)), kept + values))
    return merged


def _rising(groups: Sequence[tuple[float, list[float]]]) -> list[tuple[float, float]]:
    """The points nearest to the groups' that never fall: more work does not take less time, so a dip is noise.

    Neighbours in the wrong order share their mean, weighted by the samples behind it (pool adjacent violators).
    """
    pools: list[tuple[float, int, list[float]]] = []  # seconds, samples, the x that share them
    for x, values in groups:
        seconds, weight, xs = steady(values), len(values), [x]
        while pools and pools[-1][0] >= seconds:
            more, count, others = pools.pop()
            seconds = (seconds * weight + more * count) / (weight + count)
            weight, xs = weight + count, others + xs
        pools.append((seconds, weight, xs))
    return [(x, seconds) for seconds, _, xs in pools for x in xs]
