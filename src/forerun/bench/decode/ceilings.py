"""What this machine can do at best, in the same run: copying, reading weights for few rows, multiplying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

COLUMNS, ROWS = 16384, 65536  # of the weights that are read: 2 GiB in bfloat16
FEW = (1, 8)  # rows of a pass while decoding
SQUARE = 8192
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second."""

    copy: float | None  # read and written; None on a CPU
    linear: float  # weights read by a linear layer of one or eight rows, whichever is faster
    operations: float  # of a large product in the models' type


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    if device.type != "cuda":
        from forerun.bench.cpu.floors import measure_limits

        limits = measure_limits()
        return Ceilings(None, limits.bytes_per_second, limits.operations_per_second)
    from forerun.bench.kernels.timing import copy_bandwidth

    found = Ceilings(copy_bandwidth(), _linear(device, dtype), _product(device, dtype))
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _linear(device: torch.device, dtype: torch.dtype) -> float:
    weights = torch.zeros(ROWS, COLUMNS, device=device, dtype=dtype)
    inputs = [torch.zeros(rows, COLUMNS, device=device, dtype=dtype) for rows in FEW]
    return weights.nbytes / min(_least(lambda x=x: F.linear(x, weights)) for x in inputs)  # type: ignore[misc]


@torch.inference_mode()
def _product(device: torch.device, dtype: torch.dtype) -> float:
    square = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)  # zeros would draw less power than real numbers
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
