"""Every kernel that `forerun bench attention` will time, compiled by as many processes as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from forerun.bench.attention.cases import SDPA, TITLES, Case, Inputs, calls
from forerun.bench.attention.timing import need_gpu
from forerun.bench.compiling import compile_apart
from forerun.math.attention import Form

Job = tuple[str, list[Case]]  # a way, and the cases to call it on


def compile_all(cases: Sequence[Case]) -> None:
    compile_apart(__name__, "compile_some", [astuple(case) for case in cases])


def compile_some(part: int, parts: int, cases: Sequence[tuple[int, ...]]) -> None:
    """Every `parts`-th job."""
    device = need_gpu()
    for way, alike in jobs([Case(*numbers) for numbers in cases])[part::parts]:
        for case in alike:
            calls(case, Inputs.of(case, device, layers=1), way)[0]()


def jobs(cases: Sequence[Case]) -> list[Job]:
    """Cases that may share a kernel are one job, so that no two processes compile the same one.

    Kernels depend on heads, new tokens and the way; rows that are cut have others where lengths differ, and one more
    for every number of pieces. What `auto` chooses is among the other ways' kernels.
    """
    found: dict[tuple[object, ...], Job] = {}
    for way in TITLES:
        for case in cases:
            if way in (SDPA, Form.AUTO):
                continue
            spread = way == Form.KEYS and case.shortest < case.longest
            kind = (case.heads, case.key_heads, case.queries, way, spread)
            found.setdefault(kind, (str(way), []))[1].append(case)
    return list(found.values())
