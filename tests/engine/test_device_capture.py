"""What must not happen while a CUDA graph is captured."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from forerun.engine.device.capture import no_garbage_collected


class Cycle:
    """What only the collector frees."""

    def __init__(self) -> None:
        self.own: Any = self


def churn() -> None:
    """Far more containers than the collector waits for."""
    kept = [[number] for number in range(200_000)]
    assert len(kept) == 200_000


def test_nothing_is_freed_by_the_collector_meanwhile() -> None:
    left = weakref.ref(Cycle())
    with no_garbage_collected():
        churn()
        assert left() is not None
    gc.collect()
    assert left() is None


def test_the_comparison_can_fail() -> None:
    left = weakref.ref(Cycle())
    churn()
    assert left() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), no_garbage_collected():
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
