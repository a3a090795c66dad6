"""One call of one method: its rounds, what each row waited, and what had to be read and calculated for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from forerun.bench.decode.methods import Decoders
from forerun.bench.hardware import Work
from forerun.measure.rounds import Trace, decode
from forerun.types import RoundOutcome

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Counts and seconds of the rounds after the first two, which read the prompt."""

    method: str
    batch: int
    latencies: tuple[float, ...]  # seconds a token of each row until it finished, not divided by the batch
    round_seconds: tuple[float, ...]  # on the host's clock: from tokens to tokens
    tokens: int  # of all rows
    drafted: int
    accepted: int
    scored: int  # positions of the target's passes
    draft_steps: int  # passes of the draft model
    key_reads: int  # of the target: keys of all rows, pass after pass
    draft_key_reads: int
    captured: float = 0.0  # seconds of capturing graphs, which are not in the rounds

    @property
    def first(self) -> float:
        return min(self.latencies)

    @property
    def last(self) -> float:
        return max(self.latencies)

    @property
    def all(self) -> float:
        return fmean(self.latencies)

    @property
    def seconds(self) -> float:
        return sum(self.round_seconds)

    @property
    def row_passes(self) -> int:
        """Rows of all the target's passes together: each scores its draft and one token more."""
        return self.scored - self.drafted

    def read(self, target: Work, draft: Work) -> int:
        """Bytes that must be read: weights once a pass, and live keys and values."""
        of_target = len(self.round_seconds) * target.weight_bytes + self.key_reads * target.bytes_per_key
        return of_target + self.draft_steps * draft.weight_bytes + self.draft_key_reads * draft.bytes_per_key

    def operations(self, target: Work, draft: Work) -> int:
        """Of all positions that were run, rejected ones included: what keeps the machine busy."""
        attention = self.key_reads * self.scored // max(self.row_passes, 1) * target.operations_per_key
        of_target = self.scored * target.operations_per_token + attention
        return of_target + self.drafted * draft.operations_per_token + self.draft_key_reads * draft.operations_per_key


def measure_call(decoders: Decoders, method: str, prompts: Sequence[Prompt], **keywords: Any) -> TimedCall:
    decoder, watched = decoders.watched(method)
    trace = decode(decoder, prompts, wait=False, **keywords)
    heard = watched.outcomes[len(watched.outcomes) - len(trace.rounds) :]  # of a step for first tokens no policy hears
    return counted(method, [len(prompt) for prompt in prompts], trace, heard)


def counted(method: str, prompts: Sequence[int], trace: Trace, outcomes: Sequence[RoundOutcome]) -> TimedCall:
    """A call from its rounds; `prompts` are the lengths of the rows' prompts."""
    steps = [max(outcome.drafted) for outcome in outcomes]
    keys = _keys(prompts, trace)
    return TimedCall(
        method=method,
        batch=len(prompts),
        latencies=tuple(trace.latencies()),
        round_seconds=tuple(r.seconds for r in trace.rounds),
        tokens=trace.tokens,
        drafted=sum(sum(outcome.drafted) for outcome in outcomes),
        accepted=sum(sum(outcome.accepted) for outcome in outcomes),
        scored=sum(outcome.scored for outcome in outcomes),
        draft_steps=sum(steps),
        key_reads=sum(keys),
        draft_key_reads=sum(n * step for n, step in zip(keys, steps, strict=True)),
        captured=sum(r.captured for r in trace.rounds),
    )


def _keys(prompts: Sequence[int], trace: Trace) -> list[int]:
    """Keys of the rows that took part in each round, before it."""
    gained = [sum(r.gained.get(row, 0) for r in trace.rounds) for row in range(len(prompts))]
    length = [
        prompt + len(result.tokens) - later
        for prompt, result, later in zip(prompts, trace.result.rows, gained, strict=True)
    ]
    keys = []
    for each in trace.rounds:
        keys.append(sum(length[row] for row in each.gained))
        for row, tokens in each.gained.items():
            length[row] += tokens
    return keys
