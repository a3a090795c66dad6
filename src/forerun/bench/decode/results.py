"""What `forerun bench decode` measures, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from forerun.bench.decode.calls import Call
from forerun.bench.decode.ceilings import Ceilings
from forerun.bench.decode.device import DeviceTime
from forerun.bench.decode.forward import Forward
from forerun.bench.decode.memory import Memory
from forerun.bench.decode.peers import Peer
from forerun.bench.work import Work
from forerun.measure.provenance import Provenance

OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class Startup:
    """What the first calls at a batch size took: compiling and capturing, and some decoding."""

    batch: int
    seconds: float
    capturing: float | None  # of these, as the engine tells


@dataclass(frozen=True, slots=True)
class DecodeResults:
    """A finished or interrupted run."""

    provenance: Provenance
    settings: Mapping[str, Any]
    target: Work
    draft: Work
    calls_made: tuple[Call, ...] = ()
    ceilings: Ceilings | None = None
    alpha: float | None = None  # E[sum min(p, q)] along the target's own text
    forward: Forward | None = None  # passes alone, in a captured graph
    startups: tuple[Startup, ...] = ()
    device_times: tuple[DeviceTime, ...] = ()
    memory: tuple[Memory, ...] = ()
    peers: tuple[Peer, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> list[int]:
        return sorted({call.batch for call in self.calls_made})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(call.method for call in self.calls_made))

    def calls(self, method: str, batch: int) -> list[Call]:
        return [call for call in self.calls_made if (call.method, call.batch) == (method, batch)]

    def latency(self, which: str, method: str, batch: int) -> float | None:
        """Seconds a token of the `first` or the `last` row to finish, or the mean over `all`; mean over calls."""
        found = [getattr(call, which) for call in self.calls(method, batch)]
        return fmean(found) if found else None

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
        done = sum(call.operations(self.target, self.draft) for call in calls)
        return done / self.seconds(method, batch) / self.ceilings.operations

    @property
    def bandwidth(self) -> float | None:
        """Of a linear layer: the better of two measurements, where the forward passes were held to one of their own."""
        found = [] if self.ceilings is None else [self.ceilings.linear]
        return max([*found, *([] if self.forward is None else [self.forward.ceiling])], default=None)

    def seconds(self, method: str, batch: int) -> float:
        """Of all rounds; what took far longer than the middle one (a capture) counts as one of the others."""
        found = [seconds for call in self.calls(method, batch) for seconds in call.round_seconds]
        usual = [seconds for seconds in found if seconds < OUTLIER * median(found)]
        return fmean(usual) * len(found)
