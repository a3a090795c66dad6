"""Ours or torch's product? Timed once for each shape of weight and each number of rows, then remembered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.cpu.linear import linear, linear_at
from forerun.kernels.cpu.measured import remembered, seconds
from forerun.kernels.cpu.narrow import NarrowWeight, address, product_of
from forerun.kernels.cpu.threads import most_threads
from forerun.math.blocks import BlockFormat

BUCKETS = (1, 2, 4, 8, 16, 32)  # numbers of rows that are timed; others follow the next larger one
GAIN = 0.95  # ours must take at most this share of torch's time: a tie is not worth a second code path
NARROW_SIZE, NARROW_ROWS = 1024, (1, 4, 8)  # of a square weight; of the inputs it is timed with
SLACK = 1.05  # what a timing may vary
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


def narrow_pays(stored: BlockFormat) -> bool:
    """Whether steps with weights stored like this take less time than with float32 copies, and none takes longer."""
    return is_never_slower(list(narrow_times(stored).values()))


def narrow_times(stored: BlockFormat) -> dict[str, tuple[float, float]]:
    """Seconds of (narrow, float32) products by the number of rows, timed once on this machine."""
    threads = most_threads()
    key = f"narrow steps {stored.name} threads {threads}"
    times: dict[str, tuple[float, float]] = remembered(key, lambda: compare_narrow(stored, threads))
    return times


def is_never_slower(pairs: Sequence[tuple[float, float]]) -> bool:
    """Of (narrow, float32) seconds: a gain in all, and nowhere a loss beyond what a timing varies."""
    total = [sum(side) for side in zip(*pairs, strict=True)]
    return is_gain(*total) and all(narrow <= SLACK * wide for narrow, wide in pairs)


@torch.inference_mode()
def compare_narrow(stored: BlockFormat, threads: int) -> dict[str, tuple[float, float]]:
    """Seconds of (narrow, float32) products for plain steps, short drafts and small batches."""
    copies = FAR_APART // (NARROW_SIZE * NARROW_SIZE)
    bytes_of_row = NARROW_SIZE // stored.values * stored.size
    raws = [torch.zeros(NARROW_SIZE, bytes_of_row, dtype=torch.uint8) for _ in range(copies)]
    narrow = [NarrowWeight(raw, stored) for raw in raws]
    places = [(address(weight), product_of(weight)) for weight in narrow]
    wide = [torch.rand(NARROW_SIZE, NARROW_SIZE, dtype=torch.float32) for _ in raws]
    times = {}
    for rows in NARROW_ROWS:
        x = torch.rand(rows, NARROW_SIZE, dtype=torch.float32)
        best = seconds({"narrow": partial(_at, x, places, threads), "wide": partial(_ours, x, wide, threads)})
        times[str(rows)] = (best["narrow"], best["wide"])
    return times


def is_gain(ours: float, torchs: float) -> bool:
    """Whether so many seconds of ours are worth not using torch's product."""
    return ours < GAIN * torchs


@torch.inference_mode()
def compare(shape: tuple[int, int], threads: int) -> dict[str, tuple[float, float]]:
    """Seconds of (ours, torch's) for each number of rows."""
    copies = max(1, min(64, FAR_APART // (shape[0] * shape[1])))
    weights = [torch.rand(shape, dtype=torch.float32) for _ in range(copies)]
    seconds_by_size = {}
    for size in BUCKETS:
        x = torch.rand(size, shape[1], dtype=torch.float32)
        best = seconds({"ours": partial(_ours, x, weights, threads), "torch": partial(_torch, x, weights)})
        seconds_by_size[str(size)] = (best["ours"] / copies, best["torch"] / copies)
    return seconds_by_size


def _ours(x: Tensor, weights: list[Tensor], threads: int) -> None:
    for weight in weights:
        linear(x, weight, None, threads)


def _at(x: Tensor, places: Sequence[tuple[int, int]], threads: int) -> None:
    for place in places:
        linear_at(x, place, NARROW_SIZE, None, threads)


def _torch(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)
