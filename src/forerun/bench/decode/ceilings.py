"""What this machine can do at best, in the same run: copying, reading weights for few rows, multiplying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SQUARE = 8192
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second."""

    copy: float | None  # read and written; None on a CPU
    linear: float  # weights read by a large linear layer of one row
    operations: float  # of a large product in the models' type


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    if device.type != "cuda":
        from forerun.bench.cpu.floors import measure_limits

        limits = measure_limits()
        return Ceilings(None, limits.bytes_per_second, limits.operations_per_second)
    from forerun.bench.forward import linear_bandwidth
    from forerun.bench.kernels.timing import copy_bandwidth

    found = Ceilings(copy_bandwidth(), linear_bandwidth(device), _product(device, dtype))
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _product(device: torch.device, dtype: torch.dtype) -> float:
    square = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)  # zeros would draw less power, and be faster
    return 2 * SQUARE**3 / _least(lambda: square @ square)


def _least(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that may choose an algorithm."""
    work()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return float(min(found))
