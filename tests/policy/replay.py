"""Texts that the embedded model has said, and what its drafters would have said at every place of them.

`texts.jsonl`: greedy texts of 48 tokens behind eight Spec-Bench questions (of at most 400 tokens) of five categories
each. For every place: how long a copy prompt lookup found, its evidence and how much of it came true; how many of six
tokens of the shipped draft head came true. So a policy's choices can be timed on machines made of numbers, without a
model.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from forerun.policy.base import Policy
from forerun.types import BatchView, Draft, RoundOutcome
from policy.rounds import NoLaw

FILE = Path(__file__).with_name("texts.jsonl")
NEW = 48
DRAWN = 16  # evidence behind what a head draws, in a chain behind one drafter that copies
MOST_DRAWN = 6


class Found(NamedTuple):
    """A copy."""

    length: int
    evidence: int
    kept: int


@dataclass(frozen=True, slots=True)
class Text:
    """What could be drafted at every place."""

    category: str
    prompt: int
    copies: tuple[Found, ...]
    drawn: tuple[int, ...]


def texts() -> list[Text]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return [
        Text(row["category"], row["prompt"], tuple(Found(*place) for place in row["copies"]), tuple(row["drawn"]))
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds."""

    score: dict[int, float]  # by positions of all rows together
    step: tuple[float, float]  # of a head's step: in any case, and a row
    read: float  # a token that a head has not read
    look: float = 0.00005  # a row
    think: float = 0.0005  # the policy, in a round that asks for drafts
    host: float = 0.0003  # every round

    def scoring(self, positions: int) -> float:
        points = sorted(self.score.items())
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if positions <= x1:
                return y0 + (y1 - y0) * max(positions - x0, 0) / (x1 - x0)
        return points[-1][1] * positions / points[-1][0]


# The steps of benchmarks/results/cpu-steps.json: what they cost follows from the positions, however rows share them.
NEOVERSE = Machine(
    {1: 0.0209, 2: 0.0212, 4: 0.0281, 8: 0.0505, 16: 0.090, 32: 0.180, 64: 0.348, 128: 0.717}, (0.002, 0.0009), 0.0003
)
# AVX-512: six positions to a tile, so that a seventh costs as much as five more behind it; two cores, and one of them
# while others read from memory.
XEON = Machine(
    {1: 0.0195, 3: 0.0205, 6: 0.0255, 7: 0.056, 12: 0.066, 13: 0.090, 18: 0.098, 19: 0.124, 24: 0.130, 36: 0.19,
     72: 0.37, 136: 0.70}, (0.002, 0.0007), 0.0004,
)  # fmt: skip
BUSY_XEON = Machine(
    {1: 0.062, 6: 0.072, 7: 0.0955, 12: 0.1015, 13: 0.132, 18: 0.138, 19: 0.168, 24: 0.1725, 36: 0.24, 72: 0.45,
     136: 0.85}, (0.006, 0.0008), 0.001, think=0.001,
)  # fmt: skip


@dataclass
class Row:
    """A text on its way."""

    text: Text
    place: int = 0
    read: int = 0  # tokens that the head has read

    @property
    def left(self) -> int:
        return NEW - self.place

    @property
    def unread(self) -> int:
        return max(self.text.prompt + self.place - 2 - self.read, 0)

    @property
    def found(self) -> Found:
        return self.text.copies[self.place]


@dataclass
class Replay:
    """Rounds step by step of a drafter that copies and draws, one batch after the other."""

    machine: Machine
    seed: int = 0
    noise: float = 0.02
    tells_left: bool = True
    seconds: float = 0.0
    drafted: int = 0
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def generate(self, policy: Policy, batch: Sequence[Text], places: int = NEW) -> float:
        """Seconds until the last of these texts has its last `places` tokens."""
        started, rows = self.seconds, {next(self._ids): Row(text, NEW - places) for text in batch}
        while rows:
            self.round(policy, rows)
            rows = {number: row for number, row in rows.items() if row.left > 0}
        return self.seconds - started

    def round(self, policy: Policy, rows: dict[int, Row]) -> None:
        each, numbers = list(rows.values()), tuple(range(len(rows)))
        unread = tuple(row.unread for row in each)
        view = BatchView(
            numbers, tuple(rows), tuple(row.left - 1 for row in each), is_mixed=True, round_number=next(self._numbers),
            tokens_left=tuple(row.left for row in each) if self.tells_left else (),
            unread=unread if any(unread) else (),
        )  # fmt: skip
        asked, rooms = policy.lengths(view), policy.copy_lengths(view) or ()
        found = [min(row.found.length, room) for row, room in zip(each, rooms, strict=True)] if rooms else []
        copied = _kept(policy, view, asked, each, found) if any(found) else [0] * len(each)
        drawn = [0 if copy else min(length, MOST_DRAWN) for copy, length in zip(copied, asked, strict=True)]
        drafting = self._drafting(each, drawn, is_asked=any(asked) or any(rooms), looks=any(rooms))
        drafted = tuple(map(max, copied, drawn))
        kept = tuple(
            min(length, row.found.kept if copy else row.text.drawn[row.place])
            for row, copy, length in zip(each, copied, drafted, strict=True)
        )
        scored = len(each) + sum(drafted)
        scoring = self._timed(self.machine.scoring(scored))
        self.seconds += drafting + scoring + self.machine.host
        self.drafted += sum(drafted)
        outcome = RoundOutcome(
            numbers, tuple(rows), drafted, kept,
            tuple(row.found.evidence if copy else DRAWN for row, copy in zip(each, copied, strict=True)),
            scored, drafting, scoring, 0.0, tuple(n + 1 >= row.left for n, row in zip(kept, each, strict=True)),
            copied=tuple(not n for n in drawn), nodes=drafted, round_number=view.round_number,
            guessed=tuple(
                (row.found.evidence, row.found.kept > 0) if length else None
                for row, length in itertools.zip_longest(each, found, fillvalue=0)
                if isinstance(row, Row)
            ),
        )  # fmt: skip
        policy.observe(outcome)
        policy.forget(tuple(row for row, ended in zip(rows, outcome.ended, strict=True) if ended))
        for row, n in zip(each, kept, strict=True):
            row.place += n + 1

    def _drafting(self, rows: Sequence[Row], drawn: Sequence[int], is_asked: bool, looks: bool) -> float:
        machine = self.machine
        spent = machine.think * is_asked + machine.look * len(rows) * looks
        drawing = [row for row, length in zip(rows, drawn, strict=True) if length]
        if drawing:
            fixed, more = machine.step
            spent += self._timed(max(drawn) * (fixed + more * len(drawing)))
            spent += self._timed(machine.read * sum(row.unread for row in drawing))
        for row in drawing:
            row.read = row.text.prompt + row.place - 1
        return spent

    def _timed(self, seconds: float) -> float:
        return seconds * max(0.7, self._rng.gauss(1.0, self.noise))


def _kept(policy: Policy, view: BatchView, asked: Sequence[int], rows: Sequence[Row], found: list[int]) -> list[int]:
    """How much of each copy the policy wants, as the engine asks it."""
    lengths = torch.tensor([copy or length for copy, length in zip(found, asked, strict=True)])
    draft = Draft(
        torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64), lengths, law=NoLaw(),
        evidence=tuple(row.found.evidence if copy else DRAWN for row, copy in zip(rows, found, strict=True)),
        cuttable=tuple(map(bool, found)),
    )  # fmt: skip
    return [min(length, copy) for length, copy in zip(policy.trim(view, draft), found, strict=True)]


def plain_seconds(machine: Machine, batch: Sequence[Text]) -> float:
    """Seconds of plain decoding: one token a round, nobody asked."""
    return NEW * (machine.scoring(len(batch)) + machine.host)
