"""What `forerun bench kernels` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.kernels.cases import Case
from forerun.bench.kernels.timing import Times
from forerun.bench.records import content_of, damaged, provenance_of
from forerun.measure.provenance import Provenance

KIND = "kernels"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One case."""

    case: Case
    ours: Times
    theirs: Times | None  # transformers' function, which takes one row
    divergence: float | None = None  # total variation from the target's law, of a lossy rule's tokens


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A finished or interrupted run."""

    provenance: Provenance
    bytes_per_second: float  # of a copy, measured in the same run
    complete: bool
    measurements: tuple[Measurement, ...]
    sweep: Mapping[str, Mapping[str, float]]  # case -> change of the tuning -> microseconds in a graph
    notes: tuple[str, ...] = ()
    kind: str = KIND

    def floor(self, case: Case) -> float:
        """Microseconds that reading what must be read takes."""
        return 1e6 * case.must_read / self.bytes_per_second


def read(path: Path) -> KernelRecord:
    content = content_of(path)
    with damaged(path):
        known = {f.name: content[f.name] for f in fields(KernelRecord)}
        made = tuple(_measurement(entry) for entry in content["measurements"])
        notes = tuple(content["notes"])
        return KernelRecord(**known | {"provenance": provenance_of(content), "measurements": made, "notes": notes})


def _measurement(entry: dict[str, Any]) -> Measurement:
    theirs = entry["theirs"]
    return Measurement(
        Case(**entry["case"]), Times(**entry["ours"]), None if theirs is None else Times(**theirs), entry["divergence"]
    )
