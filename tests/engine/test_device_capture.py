"""What must not happen while a CUDA graph is captured."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.engine.device.capture import Work, capture, no_garbage_collected
from forerun.engine.device.recorder import Recorder
from forerun.kernels.captures import capture_stream
from forerun.kernels.linear import measured
from forerun.kernels.remembered import Remembered


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


class FakeGraph:
    """Stands in for `torch.cuda.graph`: notices a capture within another's time, and what each was given."""

    running, most, given = 0, 0, list[dict[str, Any]]()

    def __init__(self, graph: Any, **given: Any) -> None:
        FakeGraph.given.append(given)

    def __enter__(self) -> None:
        FakeGraph.running += 1
        FakeGraph.most = max(FakeGraph.most, FakeGraph.running)
        time.sleep(0.02)

    def __exit__(self, *error: object) -> None:
        FakeGraph.running -= 1


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Whose first entry is the current device."""
    current = [0]
    FakeGraph.running, FakeGraph.most, FakeGraph.given = 0, 0, []
    for name, fake in {
        "graph": FakeGraph,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "Stream": lambda index: SimpleNamespace(of=index),
        "stream": nullcontext,
        "current_stream": lambda: None,
        "current_device": lambda: current[0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture_stream.cache_clear()
    yield current
    capture_stream.cache_clear()


def test_a_capture_is_on_a_stream_of_its_own_device(two_gpus: list[int]) -> None:
    """Also where another device was the first to capture, and again on the same stream: pools are shared on it."""
    for two_gpus[0] in (0, 1, 0, 1):
        capture(lambda: None, None)
    streams = [given["stream"] for given in FakeGraph.given]
    assert [stream.of for stream in streams] == [0, 1, 0, 1]
    assert streams[0] is streams[2] and streams[1] is streams[3]


def test_a_pass_does_not_wait_for_a_capture_that_waits_for_it(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are timed within a pass, and another thread may capture a pass of the same model."""
    monkeypatch.setattr(measured, "PATIENCE", 0.01)
    monkeypatch.setattr(measured, "_put_off", {})
    monkeypatch.setattr(measured, "_is_chosen_on", lambda device: False)
    monkeypatch.setattr(measured, "_answers", lambda device: Remembered("none", dict))
    monkeypatch.setattr(measured, "_times", lambda *_: {"kernel": measured._microseconds(lambda: None)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight: Any = SimpleNamespace(device=torch.device("cuda:0"), shape=(8, 8), dtype=torch.bfloat16)
    answers, is_asked = list[bool](), Event()

    def asks() -> None:
        answers.append(measured.prefers_library(1, weight, False))
        is_asked.set()

    def work() -> None:
        Thread(target=asks).start()
        assert is_asked.wait(10)

    capture(work, None)
    assert answers == [True]


def test_threads_capture_one_after_the_other(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "REPEATS", -1)  # nothing is replayed
    works: list[Callable[[], object]] = [
        lambda: capture(lambda: None, None),
        lambda: measured._microseconds(lambda: None),
    ]
    threads = [Thread(target=work) for work in works * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(FakeGraph.given) == 4 and FakeGraph.most == 1
