"""Every number of the verification kernels that was chosen by measuring, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes are powers of two and count vocabulary entries unless said otherwise. None of them changes a token."""

    block: int = 4096  # read at once by a program of the statistics pass
    warps: int = 4  # of such a program
    many_loops: int = 4  # blocks one after the other in a program, where there are rows enough to fill the device
    many_programs: int = 4096  # from so many programs on
    single: int = 32768  # vocabularies up to this are summed and drawn from by one program a row
    single_warps: int = 16
    tiles: int = 8  # tiles of 1024 a program sums, where the vocabulary is larger
    sum_warps: int = 8
    pick_warps: int = 4
    group: int = 8  # entries of which the statistics pass keeps the largest, to find the top without sorting
    candidates: int = 1024  # sorted by one program; rows with a wider top are searched in memory
    super_groups: int = 1024  # largest entries the first guess at a threshold looks at
    threshold_warps: int = 8
    scan: int = 4096  # read at once while searching in memory


TUNING = Tuning()
