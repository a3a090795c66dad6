"""Every kernel that `benchmarks.attention` will time, compiled by as many processes as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from benchmarks.attention.cases import SDPA, TITLES, Case, Inputs, calls
from benchmarks.compiling import compile_apart
from forerun.math.attention import Form
from forerun.measure.timing import need_gpu

KernelGroup = tuple[str, list[Case]]  # a method, and the cases to call it on


def compile_all(cases: Sequence[Case]) -> None:
    compile_apart(__name__, "compile_some", [astuple(case) for case in cases])


def compile_some(part: int, parts: int, cases: Sequence[tuple[int, ...]]) -> None:
    """Every `parts`-th group."""
    device = need_gpu()
    for method, alike in kernel_groups([Case(*numbers) for numbers in cases])[part::parts]:
        for case in alike:
            calls(case, Inputs.of(case, device, layers=1), method)[0]()


def kernel_groups(cases: Sequence[Case]) -> list[KernelGroup]:
    """Cases that may share a kernel are one group, so that no two processes compile the same one.

    Kernels depend on heads, new tokens and the method; rows that are cut have others where lengths differ, and one more
    for every number of pieces. What `auto` chooses is among the other methods' kernels.
    """
    groups: dict[tuple[object, ...], KernelGroup] = {}
    for method in TITLES:
        for case in cases:
            if method in (SDPA, Form.AUTO):
                continue
            spread = method == Form.KEYS and case.shortest < case.longest
            kind = (case.heads, case.key_heads, case.queries, method, spread)
            groups.setdefault(kind, (str(method), []))[1].append(case)
    return list(groups.values())
