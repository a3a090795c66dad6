"""How many threads the compiled products use, and one caller at a time: Numba's pools are not all re-entrant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numba
import torch

_turn = RLock()  # a pass that holds it may meet a module whose weight is stored narrow


@contextmanager
def turn(num_threads: int) -> Iterator[None]:
    """Nobody else's products meanwhile, and no more threads woken than are used."""
    with _turn:
        before = _numba_threads()
        numba.set_num_threads(num_threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


def _numba_threads() -> int:
    """Numba's number of threads; asking for it starts them, which must not change torch's.

    Numba's OpenMP pool sets the process's number of threads to all cores when it starts. Where torch has loaded the
    same OpenMP library (x86_64), that is torch's number as well.
    """
    before = torch.get_num_threads()
    count = int(numba.get_num_threads())
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
    return count


def most_threads() -> int:
    """What the user allows torch (`torch.set_num_threads`, OMP_NUM_THREADS), and Numba has started."""
    return max(1, min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS)))


def layer_name() -> str:
    """Numba's threading layer, known once something has run in parallel."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return "none yet"
