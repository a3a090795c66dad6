"""Every number of the verification kernels that was chosen by measuring, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from forerun.kernels.launching import starts_early


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes are powers of two and count vocabulary entries unless said otherwise. None of them changes a token."""

    depth: int = 8  # entries a lane of the pass over the logits reads at once, 16 bytes a thread and step
    warps: int = 4  # of such a program
    many: int = 1 << 25  # logits from which on the device is full whatever a program takes, and those two are
    many_depth: int = 8
    many_warps: int = 8  # of float32; half as many of halves
    sum_programs: int = 512  # a program sums more than one tile of 1024 only where there were more programs than this
    few_warps: int = 8
    tiles: int = 4  # from so many tiles a program on it takes its share in turns, so many at once
    loop_programs: int = 528  # in that case
    loop_warps: int = 8
    pick_warps: int = 8
    last_draws: bool = True  # the last program of a row to finish draws; else a launch of its own
    node_tiles: int = 8  # tiles that the program of a tree's node takes at once
    node_warps: int = 16
    overlap: bool = True  # launches begin while those before them still run (compute capability 9.0 and later)
    groups: int = 8192  # of a row, at most
    hot: int = 256  # groups whose entries one program holds to cut them
    super: int = 256  # groups of groups, whose largest entries give a level below the threshold
    few: int = 256  # values compared with each other
    small_top_k_warps: int = 4  # a thread for each of 128 values, as many as are compared as a rule
    sample: int = 4096  # entries that estimate where a nucleus ends
    estimate_warps: int = 8  # of the program that does so
    estimate_rounds: int = 3  # looks at eight levels of that estimate, each nine times as fine as the one before
    collect_bits: int = 32  # entries that a thread of the second pass over the logits holds, at most 32
    collect_warps: int = 2
    listed: int = 8192  # entries near the end of a nucleus; with more the row is searched in memory
    listed_few: int = 2048  # of them are cut in less time
    resolve_warps: int = 16  # of the program that cuts the row in the end
    scan: int = 4096  # read at once while doing so


TUNING = Tuning()


def overlapping(device: torch.device, tuning: Tuning) -> dict[str, Any]:
    """Options of a kernel that may begin before the one ahead of it has ended."""
    return {"PDL": True, "launch_pdl": True} if tuning.overlap and starts_early(device) else {"PDL": False}
