"""What a measurement leaves behind: numbers, and everything one must know to trust or repeat them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forerun
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import read_json, write_whole
from forerun.version import __version__

FORMAT = 1
"""Raise it when an older reader would misunderstand a new record."""
OTHER_FILES = {
    frozenset({"draft", "temperatures"}): "`forerun train eval` wrote it; `forerun train compare FOLDER` shows it "
    "where it lies as eval.json in the drafter's folder",
    frozenset({"what", "runs"}): "`python benchmarks/train_losses.py` in a checkout draws it",
}
"""Files one may take for records, by what they hold, and the commands that show them."""
DECODE = "decode"
"""The kind of record that compares whole generate calls."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the numbers were measured on. No names of hosts or people."""

    cpu: str
    cores: int  # those this process may use
    threads: int  # torch's
    memory_gib: float
    system: str
    device: str  # as torch writes it
    gpu: str | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a record comes from; every kind of measurement begins with one."""

    date: str  # ISO 8601, UTC
    command: str
    commit: str | None  # None outside a checkout; ends in "-changed" where files differed from the commit
    versions: Mapping[str, str]
    machine: Machine


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rows of a group whose text was compared with the baseline's."""

    identical: int
    ties: int  # part where two tokens are equally likely as far as the arithmetic can tell
    different: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contender on one group of prompts, prefill included."""

    method: str
    batch: int
    category: str
    group: int
    repeat: int
    seconds: float
    prompt_tokens: int
    new_tokens: int  # all rows together
    rounds: int  # target forwards times the rows they served
    drafted: int | None  # None where the contender does not tell
    accepted: int | None
    repeated: float  # share of 4-grams that the same output already had
    agreement: Agreement | None  # None for the baseline and for sampled text
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of drafting, scoring ..., where known

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contender that cannot run at a batch size."""

    method: str
    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """A finished or interrupted comparison."""

    provenance: Provenance
    settings: Mapping[str, Any]
    titles: Mapping[str, str]  # of the methods, in the order they took turns; the first is the baseline
    complete: bool
    measurements: tuple[Measurement, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = DECODE

    @property
    def baseline(self) -> str:
        return next(iter(self.titles))


def provenance(device: Any, command: Sequence[str]) -> Provenance:
    """Of a measurement that happens now, on `device`."""
    return Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(without_folders(word) for word in command),
        commit=commit(),
        versions=versions(),
        machine=machine(device),
    )


def without_folders(word: str) -> str:
    """Where files lay is nobody's business and helps nobody: `--data=/home/me/q.jsonl` becomes `--data=q.jsonl`."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def versions() -> dict[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    compiler = {"numba": found} if (found := _version("numba")) else {}
    return {"forerun": __version__, "python": platform.python_version(), **libraries, **compiler}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: Any) -> Machine:
    import torch

    place = torch.device(device)
    return Machine(
        cpu=_cpu(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.machine()}",
        device=str(place),
        gpu=torch.cuda.get_device_name(place) if place.type == "cuda" else None,
    )


def commit() -> str | None:
    """The commit of the checkout this package runs from, if it runs from one."""
    package = Path(forerun.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src" / "forerun" != package:  # installed below somebody else's repository
        return None
    head = _git(package, "rev-parse", "--short=12", "HEAD")
    changed = _git(package, "status", "--porcelain", "--", str(package))
    return head if head is None or not changed else f"{head}-changed"


def default_path(now: datetime | None = None, start: Path | None = None, prefix: str = "bench") -> Path:
    """A fresh name in `benchmarks/results` of the checkout around `start`, or in `start` outside one."""
    start = start or Path.cwd()
    name = f"{prefix}-{(now or datetime.now()):%Y-%m-%d-%H%M%S}.json"
    for folder in (start, *start.parents):
        if (folder / "benchmarks").is_dir() and (folder / "src" / "forerun").is_dir():
            return folder / "benchmarks" / "results" / name
    return start / name


def write(record: Any, path: Path, summary: Mapping[str, Any] | None = None) -> None:
    """A dataclass of any kind of record, as JSON. `summary` is for people who read the file; readers derive it anew."""
    content = {"format": FORMAT, **asdict(record), "summary": summary or {}}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot make the folder of {str(path)!r} ({error.strerror}); name another") from error
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read(path: Path) -> Record:
    content = content_of(path)
    with damaged(path):
        return _record(content)


def content_of(path: Path) -> dict[str, Any]:
    """The JSON object of a record of any kind and of this format."""
    content = read_json(path, "give a file that `forerun bench` wrote")
    if not isinstance(content, dict):
        raise InvalidArgument(f"{str(path)!r} has record format None and this version reads {FORMAT}; measure again")
    for names, remedy in OTHER_FILES.items():
        if "format" not in content and names <= content.keys():
            raise InvalidArgument(f"{str(path)!r} is no record of a measurement: {remedy}")
    if (found := content.get("format")) != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has record format {found!r} and this version reads {FORMAT}; measure again"
        )
    return content


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """What a record lacks, in words."""
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:  # values of other types come out as many kinds
        raise InvalidArgument(f"{str(path)!r} is a damaged record ({type(error).__name__}: {error})") from error


def provenance_of(content: Mapping[str, Any]) -> Provenance:
    origin = content["provenance"]
    return Provenance(**origin | {"machine": Machine(**origin["machine"])})


def _record(content: dict[str, Any]) -> Record:
    known = {f.name: content[f.name] for f in fields(Record)}
    return Record(
        **known
        | {
            "provenance": provenance_of(content),
            "measurements": tuple(_measurement(entry) for entry in content["measurements"]),
            "refusals": tuple(Refusal(**entry) for entry in content["refusals"]),
            "notes": tuple(content["notes"]),
        }
    )


def _measurement(entry: dict[str, Any]) -> Measurement:
    agreement = entry["agreement"]
    return Measurement(**entry | {"agreement": None if agreement is None else Agreement(**agreement)})


def _git(folder: Path, *arguments: str) -> str | None:
    return _output("git", "-C", str(folder), *arguments)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    """The processor's trade name where the system tells it, else its architecture."""
    listed = (_output("lscpu") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in listed if line.startswith("Model name:")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return 0.0
