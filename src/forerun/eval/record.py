"""What `forerun eval` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.records import Agreement, content_of, damaged, provenance_of
from forerun.eval.estimate import Estimate
from forerun.eval.passes import Service
from forerun.eval.prepare import MissingTask
from forerun.eval.summary import CategoryResult, Comparison, Speed, TaskResult
from forerun.measure.provenance import Provenance

KIND = "eval"


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Findings of a run, whole or interrupted."""

    provenance: Provenance
    settings: Mapping[str, Any]
    complete: bool
    findings: tuple[TaskResult, ...]
    missing: tuple[MissingTask, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = KIND

    @property
    def differing(self) -> list[TaskResult]:
        return [finding for finding in self.findings if finding.verdict == "DIFFER"]


def journal_path(output: Path) -> Path:
    """Where the answers stand, beside the record."""
    return output.with_name(output.stem + ".answers.jsonl")


def summary(record: EvalRecord) -> dict[str, Any]:
    """Derived figures, for people who read the file."""
    return {
        finding.task: {
            "verdict": finding.verdict,
            "times_as_fast": times_as_fast(finding),
            **{f"{way}_tokens_per_second": speed.tokens_per_second for way, speed in finding.speeds.items()},
            **{f"{way}_tokens_per_round": speed.tokens_per_round for way, speed in finding.speeds.items()},
        }
        for finding in record.findings
    }


def times_as_fast(finding: TaskResult) -> float | None:
    plain, drafted = (speed.tokens_per_second for speed in finding.speeds.values())
    return drafted / plain if plain else None


def read(path: Path) -> EvalRecord:
    content = content_of(path)
    with damaged(path):
        return EvalRecord(
            provenance=provenance_of(content),
            settings=content["settings"],
            complete=content["complete"],
            findings=tuple(map(_finding, content["findings"])),
            missing=tuple(MissingTask(**entry) for entry in content["missing"]),
            notes=tuple(content["notes"]),
        )


def _finding(entry: dict[str, Any]) -> TaskResult:
    services = entry["services"]
    return TaskResult(
        **entry
        | {
            "comparisons": tuple(map(_comparison, entry["comparisons"])),
            "speeds": {way: Speed(**speed) for way, speed in entry["speeds"].items()},
            "agreement": _agreement(entry["agreement"]),
            "parts": tuple(
                CategoryResult(**part | {"agreement": _agreement(part["agreement"])}) for part in entry["parts"]
            ),
            "services": services and {way: Service(**found) for way, found in services.items()},
            "notes": tuple(entry["notes"]),
        }
    )


def _comparison(entry: dict[str, Any]) -> Comparison:
    return Comparison(**entry | {name: Estimate(**entry[name]) for name in ("plain", "speculative", "difference")})


def _agreement(entry: dict[str, int] | None) -> Agreement | None:
    return None if entry is None else Agreement(**entry)
