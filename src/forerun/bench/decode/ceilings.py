"""What this machine can do at best, in the same run: copying, reading weights for few rows, multiplying."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.measure.timing import copy_bandwidth, event_times, linear_bandwidth

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
        from forerun.bench.floors import measure_limits

        limits = measure_limits()
        return Ceilings(None, limits.bytes_per_second, limits.operations_per_second)
    found = Ceilings(copy_bandwidth(device), linear_bandwidth(device), _product(device, dtype))
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _product(device: torch.device, dtype: torch.dtype) -> float:
    square = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)  # zeros would draw less power, and be faster
    return 2 * SQUARE**3 / min(event_times(lambda: square @ square, REPEATS))
