"""Where a run stands, on disk: written beside its place and renamed, so that a kill leaves the one before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ForerunError, InvalidArgument

FORMAT = 1
NAME = "checkpoint.pt"
FULL = (errno.ENOSPC, errno.EDQUOT)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """`state` holds tensors, numbers, texts, lists and dictionaries only."""
    write_whole(folder / NAME, lambda beside: torch.save({"format": FORMAT, **state}, beside))


def load_checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if not path.is_file():
        raise InvalidArgument(f"{str(folder)!r} has no {NAME} to resume from; start the run without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InvalidArgument(f"{str(path)!r} is damaged ({error}); delete it and train again") from error
    if state.get("format") != FORMAT:
        raise InvalidArgument(f"{str(path)!r} has format {state.get('format')!r}, this version reads {FORMAT}")
    return state


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path`, then rename. A full disk is said plainly, and what stood there before stays."""
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            beside.unlink()
        raise disk_error(path, error) from error


def disk_error(path: Path, error: Exception) -> ForerunError:
    # torch's own writer hides the reason behind a RuntimeError
    full = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno in FULL)
    reason = f"the disk seems to be full ({error})" if full else str(error)
    return ForerunError(
        f"cannot write {str(path)!r}: {reason}. What was saved before is whole; make room and run again with --resume"
    )
