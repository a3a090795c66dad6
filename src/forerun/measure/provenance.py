"""Where numbers come from: date, command, commit, versions and machine, and whether others were at work on it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun import config
from forerun.processes import usable_cores
from forerun.version import __version__, installed_version

STAT = Path("/proc/stat")
LOOK_SECONDS = 0.5
CODE = ("benchmarks",)  # folders of a checkout with code that measures, beside the package
TOLERATED_CORES = 0.15  # that others may keep busy: the system itself is never quite still


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

    @property
    def name(self) -> str:
        return self.gpu or self.cpu


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a record comes from."""

    date: str  # ISO 8601, UTC
    command: str
    # None outside a checkout; ends in "-changed" where code differed from the commit, and in "-unchecked" where a copy
    # was told it without what the code must be.
    commit: str | None
    versions: Mapping[str, str]
    machine: Machine

    def sentence(self) -> str:
        """All of it but the command, in one line."""
        machine = self.machine
        return (
            f"{self.date}, {machine.name}, {machine.cores} cores, {machine.threads} threads, "
            f"{machine.memory_gib:.0f} GiB; "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items())
        ) + (f", commit {self.commit}" if self.commit else "")


def provenance(device: Any, command: Sequence[str] | None = None) -> Provenance:
    """Of a measurement that happens now, on `device`; by the `forerun` command that runs, unless another is named."""
    command = ["forerun", *sys.argv[1:]] if command is None else command
    return Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(without_folders(word) for word in command),
        commit=commit(),
        versions=versions(),
        machine=machine(device),
    )


def without_folders(word: str) -> str:
    """Records do not say where files lay: `--data=/home/me/q.jsonl` becomes `--data=q.jsonl`, and `lookup,ngram:/a/b`
    becomes `lookup,ngram:b`."""
    option, equals, value = word.rpartition("=")
    parts = [value] if Path(value).is_absolute() else value.split(",")
    return option + equals + ",".join(map(_without_folder, parts))


def _without_folder(part: str) -> str:
    kind, colon, path = ("", "", part) if Path(part).is_absolute() else part.rpartition(":")
    is_url = path.startswith("//") and bool(colon)
    return kind + colon + (Path(path).name if Path(path).is_absolute() and not is_url else path)


def versions() -> dict[str, str]:
    """Of what decides the numbers; packages that are missing are left out."""
    libraries = {name: installed_version(name) for name in ("torch", "transformers", "numba")}
    installed = {name: version for name, version in libraries.items() if version is not None}
    return {"forerun": __version__, "python": platform.python_version(), **installed}


def machine(device: Any) -> Machine:
    import torch

    place = torch.device(device)
    return Machine(
        cpu=_cpu(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.machine()}",
        device=str(place),
        gpu=torch.cuda.get_device_name(place) if place.type == "cuda" else None,
    )


def commit() -> str | None:
    """The commit of the checkout this package runs from, if it runs from one; of a bare copy, the one it is told."""
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src" / "forerun" != package:  # installed below somebody else's repository
        return _told(package)
    head = _git(package, "rev-parse", "--short=12", "HEAD")
    kept = [f":(top,glob){folder}/**/*.py" for folder in CODE]
    changed = _git(package, "status", "--porcelain", "--untracked-files=all", "--", str(package), *kept)
    return head if head is None or not changed else f"{head}-changed"


def stamp() -> str | None:
    """What a copy of this checkout without its repository is told as FORERUN_COMMIT: the commit, and a digest of the
    code, by which a copy that was changed afterwards is known."""
    revision = commit()
    return None if revision is None else f"{revision}:{code_digest(Path(__file__).resolve().parents[1])}"


def _told(package: Path) -> str | None:
    told = config.commit()
    if told is None:
        return None
    name, colon, digest = told.partition(":")
    if not colon:
        return f"{name}-unchecked"
    is_changed = digest != code_digest(package) and not name.endswith("-changed")
    return f"{name}-changed" if is_changed else name


def code_digest(package: Path) -> str:
    """Of all Python files of the package, and of those beside it that measure."""
    top, digest = package.parents[1], hashlib.sha256()
    for folder in (package, *(top / name for name in CODE)):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(top).as_posix()}\n".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def busy_note(when: str = "began") -> str | None:
    """A warning for the record where other programs are running; None where all is quiet, or nothing is known."""
    busy = cores_of_others()
    if busy is None or busy <= TOLERATED_CORES:
        return None
    return f"other programs kept {busy:.1f} cores busy when this {when}: repeat it on a quiet machine"


def cores_of_others() -> float | None:
    """Cores that other processes keep busy, looked at for a moment; None where the system does not tell."""
    before = _busy_seconds()
    if before is None:
        return None
    started = time.perf_counter()
    time.sleep(LOOK_SECONDS)
    passed, after = time.perf_counter() - started, _busy_seconds()
    return None if after is None else max(0.0, (after - before) / passed)


def _busy_seconds() -> float | None:
    """Seconds all processors together have worked since they were started, our own left out."""
    try:
        user, nice, system, _idle, _waiting, *rest = map(int, STAT.read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError, IndexError):
        return None
    ticks = user + nice + system + sum(rest[:2])  # then come interrupts; guests are counted in `user` already
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


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


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return 0.0
