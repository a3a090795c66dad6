"""Ours or torch's product? Timed once for each shape of weight and each number of rows, then remembered."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu.linear import linear
from forerun.kernels.cpu.measured import remembered, seconds
from forerun.kernels.cpu.threads import most_threads

BUCKETS = (1, 2, 4, 8, 16, 32)  # numbers of rows that are timed; others follow the next larger one
GAIN = 0.95  # ours must take at most this share of torch's time: a tie is not worth a second code path
FAR_APART = 8 << 20  # floats to walk through between repeats, so that weights come from memory as in a real step


def bucket(rows: int) -> int:
    """The timed number of rows that stands for `rows`."""
    return next((size for size in BUCKETS if rows <= size), BUCKETS[-1])


def is_faster(weight: Tensor, rows: int) -> bool:
    """Whether our product is the faster one for `rows` inputs against a weight of this shape."""
    return _wins(tuple(weight.shape), most_threads())[bucket(rows)]


@cache
def _wins(shape: tuple[int, int], threads: int) -> dict[int, bool]:
    times = remembered(f"product {shape[0]}x{shape[1]} threads {threads}", lambda: compare(shape, threads))
    return {size: is_gain(*times[str(size)]) for size in BUCKETS}


def is_gain(ours: float, torchs: float) -> bool:
    """Whether so many seconds of ours are worth not using torch's product."""
    return ours < GAIN * torchs


@torch.inference_mode()
def compare(shape: tuple[int, int], threads: int) -> dict[str, tuple[float, float]]:
    """Seconds of (ours, torch's) for each number of rows."""
    copies = max(1, min(64, FAR_APART // (shape[0] * shape[1])))
    weights = [torch.rand(shape) for _ in range(copies)]
    seconds_by_size = {}
    for size in BUCKETS:
        x = torch.rand(size, shape[1])
        best = seconds({"ours": partial(_ours, x, weights, threads), "torch": partial(_torch, x, weights)})
        seconds_by_size[str(size)] = (best["ours"] / copies, best["torch"] / copies)
    return seconds_by_size


def _ours(x: Tensor, weights: list[Tensor], threads: int) -> None:
    for weight in weights:
        linear(x, weight, None, threads)


def _torch(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)
