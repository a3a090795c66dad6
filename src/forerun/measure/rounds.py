"""A decoding call round by round: what each took, and what each row gained."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.decoder import SpeculativeDecoder
from forerun.engine import Seconds, Stats
from forerun.result import GenerateResult
from forerun.stream import Stream

SKIP = 2
"""Rounds left out of every figure: the first reads the prompt, in the second the drafter catches up with it."""
PHASES = ("draft", "score", "verify")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the whole batch."""

    seconds: float
    phases: Mapping[str, float]  # seconds of drafting, scoring and verifying
    gained: Mapping[int, int]  # tokens by row, of the rows that took part
    captured: float = 0.0  # seconds of recording it as a graph, paid once a shape: not in `seconds`


@dataclass(frozen=True, slots=True)
class Trace:
    """A call whose prompt's rounds are kept apart."""

    rounds: tuple[Round, ...]  # those after `SKIP`
    result: GenerateResult

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return sum(sum(r.gained.values()) for r in self.rounds)

    @property
    def stats(self) -> Stats:
        return self.result.stats

    def phase(self, name: str) -> float:
        """Mean seconds a round."""
        return sum(r.phases[name] for r in self.rounds) / max(len(self.rounds), 1)

    def latencies(self) -> list[float]:
        """Seconds a token of each row until it finished, BASS's measure: not divided by the batch."""
        seconds_a_token = []
        for row in range(len(self.result.rows)):
            last = max((i for i, r in enumerate(self.rounds) if row in r.gained), default=None)
            if last is None:  # finished while others were still reading
                continue
            taken = sum(r.seconds for r in self.rounds[: last + 1])
            seconds_a_token.append(taken / sum(r.gained.get(row, 0) for r in self.rounds))
        return seconds_a_token


def decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], *, wait: bool = True, **keywords: Any
) -> Trace:
    """Decode a batch and look at the clock after every round. Rows never end early unless an end token is given.

    Tokens are on the host when a round is over. With `wait` the device has nothing left to do then, either, which keeps
    phases apart and keeps a decoder from working ahead.
    """
    return follow(decoder, decoder.stream(prompts, **{"eos_token_id": [], **keywords}), wait)


def follow(decoder: SpeculativeDecoder, stream: Stream, wait: bool) -> Trace:
    """A call that has not begun, to its end."""
    rounds = []
    before = now(decoder, wait)
    while (progress := next(stream, None)) is not None:
        after = now(decoder, wait)
        rounds.append(_round(before, after, {p.row: len(p.tokens) for p in progress}))
        before = now(decoder, wait)
    return Trace(tuple(rounds[SKIP:]), stream.result)


def now(decoder: SpeculativeDecoder, wait: bool) -> tuple[float, Seconds]:
    """The clock, once the device has done its work where that is waited for, and the seconds the engine has counted."""
    if wait and decoder.target.device.type == "cuda":
        torch.cuda.synchronize(decoder.target.device)
    return time.perf_counter(), replace(decoder.engine.seconds)


def _round(before: tuple[float, Seconds], after: tuple[float, Seconds], gained: Mapping[int, int]) -> Round:
    spent = after[1] - before[1]
    phases = {name: getattr(spent, name) for name in PHASES}
    return Round(after[0] - before[0] - spent.capture, phases, gained, spent.capture)
