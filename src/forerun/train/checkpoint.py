"""Where a run stands, on disk: written beside its place and renamed, so that a kill leaves the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.errors import InvalidArgument
from forerun.files import write_whole

FORMAT = 1
NAME = "checkpoint.pt"
AGAIN = "make room and run again with --resume"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """`state` holds tensors, numbers, texts, lists and dictionaries only."""
    write_whole(folder / NAME, lambda beside: torch.save({"format": FORMAT, **state}, beside), AGAIN)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if not path.is_file():
        raise InvalidArgument(f"{str(folder)!r} has no {NAME} to resume from; start the run without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InvalidArgument(f"{str(path)!r} is damaged ({error}); delete it and train again") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has format {found!r}, this version reads {FORMAT}; delete it and train again"
        )
    return state
