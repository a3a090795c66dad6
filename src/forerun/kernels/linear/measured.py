"""Few-row products on devices that the tiles of `project` were not chosen on: theirs or the library's, by the clock.

Timed once a shape and device, and remembered on disk. Where the tiles were chosen by measuring, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from forerun.kernels.captures import Busy, capturing
from forerun.kernels.linear import norms, project
from forerun.kernels.remembered import Remembered
from forerun.version import __version__

# By name: an H100 has the same compute capability and slower memory, a part of an H200 (MIG) fewer multiprocessors.
CHOSEN_ON = frozenset({"NVIDIA H200"})
CLEARLY = 1.1  # times as fast: products that are about level are ours, whatever the moment of timing says
LAUNCHES, REPEATS = 10, 5  # in one CUDA graph, so that no launch waits for the host; the best replay counts
PATIENCE = 1.0  # seconds to wait for another thread's capture, which may itself wait for the pass that asks here
RETRY = 30.0  # seconds without another such wait: a pass has hundreds of products
_put_off: dict[str, float] = {}  # products that were not timed for it, and when they may be again


def prefers_library(rows: int, weight: Tensor, in_pairs: bool) -> bool:
    """Whether torch's product of so many rows with a plain weight was measured clearly faster on its device."""
    if weight.device.type != "cuda" or _is_chosen_on(weight.device):
        return False
    rows = next(most for most in project.ROWS if rows <= most)
    key = f"{rows} rows, {tuple(weight.shape)}, {weight.dtype}{', in pairs' if in_pairs else ''}"
    answers = _answers(weight.device)
    if key not in answers.known():
        if torch.cuda.is_current_stream_capturing():
            return key in _put_off  # whoever records rehearses first, and records what it rehearsed
        if monotonic() < max(_put_off.values(), default=0.0):
            _put_off.setdefault(key, 0.0)
            return True
    try:
        times = answers.get(key, lambda: _times(rows, weight, in_pairs))
    except Busy:  # for now: the library's runs on any device
        _put_off[key] = monotonic() + RETRY
        return True
    _put_off.pop(key, None)
    return times["kernel"] is None or times["library"] * CLEARLY < times["kernel"]


@cache
def _is_chosen_on(device: torch.device) -> bool:
    return torch.cuda.get_device_name(device) in CHOSEN_ON


@cache
def _answers(device: torch.device) -> Remembered:
    machine = {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
        "forerun": __version__,
    }  # fmt: skip
    return Remembered("gpu", lambda: machine)


def _times(rows: int, weight: Tensor, in_pairs: bool) -> dict[str, float | None]:
    """Microseconds of each; None for a kernel that the device cannot run."""
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    works: dict[str, Callable[[], Any]] = {
        "kernel": lambda: project.gate(x, weight) if in_pairs else project.project(x, weight),
        "library": lambda: norms.gated(F.linear(x, weight)) if in_pairs else F.linear(x, weight),
    }
    try:
        works["kernel"]()
        torch.cuda.synchronize(weight.device)
    except Exception:  # more shared memory than it has, or an instruction that it lacks
        works.pop("kernel")
    with torch.cuda.device(weight.device):
        times = {name: round(_microseconds(work), 2) for name, work in works.items()}
    return {"kernel": None, **times}


def _microseconds(work: Callable[[], Any]) -> float:
    work()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, patience=PATIENCE):
        for _ in range(LAUNCHES):
            work()
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first loads the graph
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 1e3 * best / LAUNCHES
