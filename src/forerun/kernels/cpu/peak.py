"""How fast the tile can be at best: the same few rows again and again, out of the first cache."""

from __future__ import annotations

import time

import torch
from numba import prange

from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.threads import turn
from forerun.kernels.cpu.tile import MOST_TOKENS, ROWS, wide
from forerun.kernels.cpu.widen import FLOAT32, WIDEST

SIZE = 512  # floats of a row: weights and inputs of a tile together are 20 KiB
ROUNDS = 20_000
REPEATS = 5


@njit(nogil=True, parallel=True, cache=True)
def _again(w: int, x: int, out: int, size: int, tokens: int, rounds: int, num_threads: int) -> None:
    for part in prange(num_threads):
        for _ in range(rounds):
            wide(FLOAT32, WIDEST, w, size * 4, x, size, out + part * tokens * size * 4, size, tokens, size)


def operations_per_second(num_threads: int) -> float:
    """Multiplications and additions, the best of several tries."""
    w, x, out = (
        torch.ones(count, SIZE, dtype=torch.float32) for count in (ROWS, MOST_TOKENS, num_threads * MOST_TOKENS)
    )
    best = float("inf")
    with turn(num_threads):
        for _ in range(1 + REPEATS):  # the first one may compile
            started = time.perf_counter()
            _again(w.data_ptr(), x.data_ptr(), out.data_ptr(), SIZE, MOST_TOKENS, ROUNDS, num_threads)
            best = min(best, time.perf_counter() - started)
    return num_threads * ROUNDS * 2 * ROWS * MOST_TOKENS * SIZE / best
