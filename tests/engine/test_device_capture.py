"""What must not happen while a CUDA graph is captured."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.engine.device.capture import Work, no_garbage_collected
from forerun.engine.device.recorder import Recorder


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


def test_memory_of_graphs_from_before_a_failed_capture_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails spoils its pool for later ones, but not the graphs that are in it."""
    handles, used = ((0, number) for number in range(1, 10)), list[tuple[int, int]]()

    def captured(work: Work, pool: tuple[int, int]) -> Any:
        used.append(pool)
        work()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr("forerun.engine.device.recorder.capture", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    sizes = {(0, 0): 1, (0, 1): 10, (0, 2): 200}
    segments = [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes.items()]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    recorder, runs = Recorder(torch.device("cuda")), list[int]()

    def fails_once() -> None:
        runs.append(1)
        if len(runs) == 2:  # the first is the rehearsal
            raise RuntimeError("a launch that was not rehearsed")

    assert recorder.num_bytes() == 0
    recorder.record(lambda: None, ())
    assert recorder.num_bytes() == 10
    recorder.record(fails_once, ())
    recorder.record(lambda: None, ())
    assert used == [(0, 1), (0, 1), (0, 2), (0, 2)] and recorder.num_bytes() == 210
    assert recorder.num_recordings == 3
