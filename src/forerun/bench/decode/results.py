"""What `forerun bench decode` measures, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

from forerun.bench.decode.calls import TimedCall
from forerun.bench.decode.device import DeviceTime
from forerun.bench.decode.forward import Forward
from forerun.bench.decode.memory import Memory
from forerun.bench.hardware import Ceilings, Work
from forerun.measure.provenance import Provenance

OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class Startup:
    """What the first calls at a batch size took: compiling and capturing, and some decoding."""

    batch: int
    seconds: float
    capturing: float  # of these


@dataclass(frozen=True, slots=True)
class PeerCall:
    """One call of transformers' own generation, reading the prompt included."""

    title: str
    batch: int
    tokens: int  # new ones of each row
    seconds: float
    target_passes: int


@dataclass(slots=True)
class DecodeResults:
    """What has been measured until now; what a part found is None or empty before it ran."""

    provenance: Provenance
    settings: Mapping[str, Any]
    target: Work
    draft: Work
    calls_made: list[TimedCall] = field(default_factory=list)
    ceilings: Ceilings | None = None
    alpha: float | None = None  # E[sum min(p, q)] along the target's own text
    forward: Forward | None = None  # passes alone, in a captured graph
    startups: list[Startup] = field(default_factory=list)
    device_times: list[DeviceTime] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    peers: list[PeerCall] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> list[int]:
        return sorted({call.batch for call in self.calls_made})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(call.method for call in self.calls_made))

    @property
    def timed(self) -> list[tuple[int, str]]:
        """(batch, method) of every row of the tables."""
        return [(batch, method) for batch in self.batches for method in self.methods if self.calls(method, batch)]

    def calls(self, method: str, batch: int) -> list[TimedCall]:
        return [call for call in self.calls_made if (call.method, call.batch) == (method, batch)]

    def latency(self, which: str, method: str, batch: int) -> float | None:
        """Seconds a token of the `first` or the `last` row to finish, or the mean over `all`; mean over calls."""
        latencies = [getattr(call, which) for call in self.calls(method, batch)]
        return fmean(latencies) if latencies else None

    def tokens_a_round(self, method: str, batch: int) -> float:
        """New tokens of a row in one of its rounds."""
        calls = self.calls(method, batch)
        return sum(call.tokens for call in calls) / sum(call.row_passes for call in calls)

    def percentiles(self, method: str, batch: int) -> tuple[float, float, float]:
        """Seconds of a round: p50, p90, p99."""
        rounds = self._round_seconds(method, batch)
        cuts = quantiles(rounds, n=100, method="inclusive") if len(rounds) > 1 else rounds * 99
        return cuts[49], cuts[89], cuts[98]

    def steady(self, method: str, batch: int) -> float | None:
        """Seconds a token if every round were the middle one: no captures, hiccups, or rounds of the last rows."""
        if not self.calls(method, batch):
            return None
        return self.percentiles(method, batch)[0] / self.tokens_a_round(method, batch)

    def read_share(self, method: str, batch: int) -> float | None:
        """Of the bandwidth at which a linear layer reads its weights."""
        calls, bandwidth = self.calls(method, batch), self.bandwidth
        if not calls or bandwidth is None:
            return None
        return sum(call.read(self.target, self.draft) for call in calls) / self.seconds(method, batch) / bandwidth

    def utilisation(self, method: str, batch: int) -> float | None:
        """Of the operations a second that a large product reaches: BASS's FLOPS utilisation."""
        calls = self.calls(method, batch)
        if not calls or self.ceilings is None:
            return None
        operations = sum(call.operations(self.target, self.draft) for call in calls)
        return operations / self.seconds(method, batch) / self.ceilings.operations

    @property
    def bandwidth(self) -> float | None:
        """Of a linear layer: the better of two measurements, where the forward passes were held to one of their own."""
        measured = [] if self.ceilings is None else [self.ceilings.linear]
        return max([*measured, *([] if self.forward is None else [self.forward.ceiling])], default=None)

    def seconds(self, method: str, batch: int) -> float:
        """Of all rounds; what took far longer than the middle one (a capture) counts as one of the others."""
        rounds = self._round_seconds(method, batch)
        return fmean(seconds for seconds in rounds if seconds < OUTLIER * median(rounds)) * len(rounds)

    def _round_seconds(self, method: str, batch: int) -> list[float]:
        return [seconds for call in self.calls(method, batch) for seconds in call.round_seconds]
