"""What a pass of a model must read and calculate, whatever the program, and what this machine can do at best."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.measure.timing import copy_bandwidth, event_times, linear_bandwidth, wall_times
from forerun.models.cache_size import bytes_per_token
from forerun.models.plain import address, stored_bytes

TIMES_CACHE = 4  # a buffer that many times the last cache comes from memory
LEAST_BUFFER, MOST_BUFFER = 256 << 20, 2 << 30  # bytes
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
CPU_SQUARE, GPU_SQUARE = 512, 8192  # sides of the products that are timed
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass must do, whatever the program."""

    weight_bytes: int  # all weights but an embedding that is only looked up in
    operations_per_token: int  # by weights
    bytes_per_key: int  # of keys and values in the cache
    operations_per_key: int  # and token, in attention


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and operations a second, measured in the same run as what is held against them."""

    copy: float | None  # read and written; None on a CPU
    linear: float  # weights read by a large linear layer of one row
    operations: float  # of a large product in the models' type


def work_of(model: Any) -> Work:
    """From the model's parameters and shape."""
    config = model.config.get_text_config(decoder=True)
    weights = {address(p): p for p in model.parameters()}
    head, embedding = model.get_output_embeddings(), getattr(model.get_input_embeddings(), "weight", None)
    if embedding is not None and (head is None or address(head.weight) != address(embedding)):
        weights.pop(address(embedding), None)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Work(
        weight_bytes=sum(map(stored_bytes, weights.values())),
        operations_per_token=2 * sum(p.numel() for p in weights.values() if p.ndim > 1),
        bytes_per_key=bytes_per_token(model),
        operations_per_key=layers * 4 * heads * size,
    )


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """On a CPU the best of torch's and our own kernels: a floor should be as low as anything has reached."""
    if device.type != "cuda":
        size = _buffer_bytes()
        return Ceilings(None, max(size / min(wall_times(work, REPEATS)) for work in _readers(size)), max(_cpu_peaks()))
    ceilings = Ceilings(copy_bandwidth(device), linear_bandwidth(device), _gpu_peak(device, dtype))
    torch.cuda.empty_cache()
    return ceilings


def _gpu_peak(device: torch.device, dtype: torch.dtype) -> float:
    square = torch.randn(GPU_SQUARE, GPU_SQUARE, device=device, dtype=dtype)  # zeros draw less power, and are faster
    return 2 * GPU_SQUARE**3 / min(event_times(lambda: square @ square, REPEATS))


def _cpu_peaks() -> list[float]:
    """Operations a second of a large product by torch, and of our tile where it is at its best."""
    square = torch.ones(CPU_SQUARE, CPU_SQUARE)
    peaks = [2 * CPU_SQUARE**3 / min(wall_times(lambda: F.linear(square, square), REPEATS))]
    if kernels.why_not_numba() is None:
        from forerun.kernels.cpu import peak, threads

        peaks.append(peak.operations_per_second(threads.most_threads()))
    return peaks


def _readers(size: int) -> list[Callable[[], object]]:
    """Calls that read `size` bytes from memory."""
    buffer = torch.ones(size // 4 // 1024, 1024)
    readers: list[Callable[[], object]] = [buffer.sum]
    if kernels.why_not_numba() is None:
        from forerun.kernels.cpu import linear, threads

        row = torch.ones(1, 1024)
        readers.append(lambda: linear.linear(row, buffer, None, threads.most_threads()))
    return readers


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
