"""Every number of the verification kernels that was chosen by measuring, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes are powers of two and count vocabulary entries unless said otherwise. None of them changes a token."""

    block: int = 4096  # read at once by a program of the pass over the logits
    lanes: int = 512  # of these side by side; entries so far apart form a group, of which the largest is kept
    warps: int = 4  # of such a program
    many: int = 1 << 25  # logits from which on the device is full whatever a program takes, and those three are
    many_block: int = 8192
    many_lanes: int = 1024
    many_warps: int = 8
    tiles: int = 8  # tiles of 1024 a program sums at most
    sum_programs: int = 512  # it sums more than one only where there are more programs than this
    few_warps: int = 4
    sum_warps: int = 8
    pick_warps: int = 4
    last_draws: bool = True  # the last program of a row to finish draws; else a launch of its own
    overlap: bool = True  # launches begin while those before them still run (compute capability 9.0 and later)
    groups: int = 8192  # of a row, at most
    hot: int = 256  # groups whose entries one program holds to cut them
    super_groups: int = 1024  # largest entries the first guess at a threshold looks at
    threshold_warps: int = 8
    sample: int = 4096  # entries that estimate where a wide nucleus ends
    wide_block: int = 4096  # read at once by a program of those that cut a row together
    wide_warps: int = 8
    listed: int = 8192  # entries near the end of a wide nucleus; with more the row is searched in memory
    scan: int = 4096  # read at once while doing so


TUNING = Tuning()


def overlapping(device: torch.device, tuning: Tuning) -> dict[str, Any]:
    """Options of a kernel that may begin before the one ahead of it has ended."""
    can = tuning.overlap and device.type == "cuda" and _capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if can else {"PDL": False}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
