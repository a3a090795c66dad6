"""Timings of encoder-decoder pairs.

A call is everything behind the encoder: keys and values of the sources, the first round, all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from forerun.measure.provenance import Provenance

PLAIN, DRAFTS, THEIRS = "plain", "drafts", "transformers"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One method on one batch; the encoder and the recording of graphs are measured apart."""

    pair: str
    batch: int
    method: str
    seconds: tuple[float, ...]  # of whole calls, one entry a repeat
    tokens: int  # new ones of all rows, of each repeat
    encoder_seconds: float
    # Of each repeat, transformers' apart: seconds a token from the third round on until a row was finished, the mean
    # over rows, which is BASS's measure; and the middle round.
    latencies: tuple[float, ...] = ()
    round_seconds: tuple[float, ...] = ()
    capture_seconds: float = 0.0  # all repeats together, not part of `seconds`
    tokens_per_round: float | None = None
    acceptance_rate: float | None = None

    @property
    def milliseconds_a_token(self) -> float:
        """Of a row, whatever the batch, until all are finished."""
        return 1e3 * median(self.seconds) * self.batch / self.tokens

    @property
    def steady_milliseconds(self) -> float | None:
        """The same from the third round on, and until each row is finished."""
        return 1e3 * median(self.latencies) if self.latencies else None


@dataclass(frozen=True, slots=True)
class Seq2SeqResults:
    """A finished or interrupted run."""

    provenance: Provenance
    settings: dict[str, Any]
    measurements: tuple[Measurement, ...]

    @property
    def places(self) -> list[tuple[str, int]]:
        """Pairs and batches that were measured."""
        return list(dict.fromkeys((m.pair, m.batch) for m in self.measurements))

    def ratio(self, pair: str, batch: int, base: str = PLAIN) -> float | None:
        """How many times as fast drafts are as `base`."""
        return self._ratio(pair, batch, base, lambda m: m.milliseconds_a_token)

    def steady_ratio(self, pair: str, batch: int, base: str = PLAIN) -> float | None:
        """The same from the third round on."""
        return self._ratio(pair, batch, base, lambda m: m.steady_milliseconds)

    def _ratio(self, pair: str, batch: int, base: str, figure: Callable[[Measurement], float | None]) -> float | None:
        figures = {m.method: figure(m) for m in self.measurements if (m.pair, m.batch) == (pair, batch)}
        theirs, ours = figures.get(base), figures.get(DRAFTS)
        return None if theirs is None or ours is None else theirs / ours
