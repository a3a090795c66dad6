"""Who does what when threads split a weight between them."""

from __future__ import annotations

from forerun.kernels.cpu.disk_cache import njit
from forerun.math.panels import PANEL

GRAIN = PANEL  # rows of a weight that no two threads split: tiles take four, panels lie in sixteens


@njit(nogil=True, cache=True)
def share(count: int, part: int, parts: int, grain: int) -> tuple[int, int]:
    """The `part`-th of `parts` nearly equal pieces of 0 .. count - 1, cut at multiples of `grain`."""
    grains = (count + grain - 1) // grain
    return min(grains * part // parts * grain, count), min(grains * (part + 1) // parts * grain, count)
