"""What the hardware allows at best: every weight read once, every multiplication done at full speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.bench.work import Limits
from forerun.measure.timing import wall_times

TIMES_CACHE = 4  # a buffer that many times the last cache comes from memory
LEAST_BUFFER, MOST_BUFFER = 256 << 20, 2 << 30  # bytes
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
LARGE = 512  # of a square product by torch
REPEATS = 5


@torch.inference_mode()
def measure_limits() -> Limits:
    """The best of torch's and our own reading and multiplying: a floor should be as low as anything has reached."""
    size = _buffer_bytes()
    return Limits(
        bytes_per_second=max(size / min(wall_times(work, REPEATS)) for work in _readers(size)),
        operations_per_second=max(_peaks()),
        buffer_bytes=size,
    )


def _buffer_bytes() -> int:
    """Well beyond the last cache, and no more than a quarter of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else MOST_BUFFER
    wanted = max(LEAST_BUFFER, (TIMES_CACHE + 1) * _last_cache())
    return int(min(wanted, MOST_BUFFER, memory // 4)) // 4096 * 4096


def _last_cache() -> int:
    try:
        text = LAST_CACHE.read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def _readers(size: int) -> list[Callable[[], object]]:
    buffer = torch.ones(size // 4 // 1024, 1024)
    found: list[Callable[[], object]] = [buffer.sum]
    if kernels.why_not_numba() is None:
        from forerun.kernels.cpu import linear, threads

        row = torch.ones(1, 1024)
        found.append(lambda: linear.linear(row, buffer, None, threads.most_threads()))
    return found


def _peaks() -> list[float]:
    """Operations a second of a large product by torch, and of our tile where it is at its best."""
    square = torch.ones(LARGE, LARGE)
    found = [2 * LARGE**3 / min(wall_times(lambda: F.linear(square, square), REPEATS))]
    if kernels.why_not_numba() is None:
        from forerun.kernels.cpu import peak, threads

        found.append(peak.operations_per_second(threads.most_threads()))
    return found
