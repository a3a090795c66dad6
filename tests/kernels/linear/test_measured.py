"""Ours or the library's products on devices that no tile was chosen on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from forerun import ops
from forerun.kernels.captures import Busy
from forerun.kernels.linear import measured
from forerun.kernels.remembered import Remembered
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone

pytestmark = kernel_tests()
GPU = SimpleNamespace(type="cuda")


class Weight:
    """What is asked of a weight on a GPU that is not here."""

    device, dtype = GPU, torch.bfloat16

    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[int, bool]]]:
    """A device that nothing was measured on; what is timed there, each kernel 10 us, the library as `library` says."""
    asked: list[tuple[int, bool]] = []

    def times(rows: int, weight: Any, in_pairs: bool) -> dict[str, float | None]:
        asked.append((rows, in_pairs))
        return {"kernel": None if weight.shape[1] == 13 else 10.0, "library": float(weight.shape[0])}

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    answers = Remembered("gpu", lambda: "another")
    monkeypatch.setattr(measured, "_is_chosen_on", lambda device: False)
    monkeypatch.setattr(measured, "_answers", lambda device: answers)
    monkeypatch.setattr(measured, "_times", times)
    monkeypatch.setattr(measured, "_put_off", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield asked
    answers.forget()


def prefers(rows: int, *shape: int, in_pairs: bool = False) -> bool:
    return measured.prefers_library(rows, Weight(*shape), in_pairs)  # type: ignore[arg-type]


def test_a_shape_is_timed_once_for_all_rows_that_one_kernel_takes(timed: list[tuple[int, bool]]) -> None:
    for _ in range(2):
        for rows in (1, 2, 9, 16, 17, 64):
            prefers(rows, 20, 8)
        prefers(1, 20, 8, in_pairs=True)
    assert timed == [(1, False), (16, False), (64, False), (1, True)]


def test_the_library_has_to_be_clearly_faster(timed: list[tuple[int, bool]]) -> None:
    assert prefers(1, 9, 8) and not prefers(1, 10, 8) and not prefers(1, 11, 8)
    assert not prefers(1, 9.5, 8), "level: a moment's noise must not decide"  # type: ignore[arg-type]
    assert prefers(1, 99, 13), "a kernel that the device cannot run"


def test_the_next_process_finds_it_on_disk(timed: list[tuple[int, bool]]) -> None:
    assert prefers(1, 5, 8)
    measured._answers(GPU).forget()  # type: ignore[arg-type]
    assert prefers(1, 5, 8) and len(timed) == 1


def test_nothing_is_timed_while_a_pass_is_recorded(
    timed: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefers(1, 5, 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert prefers(1, 5, 8) and not prefers(1, 4, 8) and len(timed) == 1


def test_a_pass_waits_once_for_another_threads_capture(
    timed: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has hundreds of products. What it took meanwhile is recorded behind it; later each product is timed."""
    now, waits, times = [100.0], [0], measured._times

    def busy(*_: Any) -> Any:
        waits[0] += 1
        raise Busy

    monkeypatch.setattr(measured, "monotonic", lambda: now[0])
    monkeypatch.setattr(measured, "_times", busy)
    assert prefers(1, 20, 8) and prefers(1, 30, 8) and prefers(1, 20, 8) and waits == [1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert prefers(1, 20, 8) and prefers(1, 30, 8) and not prefers(1, 40, 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(measured, "_times", times)
    now[0] += measured.RETRY + 1
    assert not prefers(1, 20, 8) and not prefers(1, 30, 8) and len(timed) == 2


def test_where_tiles_were_chosen_nothing_is_timed(
    timed: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_is_chosen_on", lambda device: True)
    assert not prefers(1, 5, 8) and not timed


@pytest.mark.parametrize(("name", "is_timed"), [
    ("NVIDIA H200", False), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200 MIG 1g.18gb", True),
])  # fmt: skip
def test_a_device_of_the_same_generation_is_another_one(
    name: str, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert measured._is_chosen_on.__wrapped__(torch.device("cuda", 0)) != is_timed


def test_ops_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.kernels.TRITON_DEVICES", {DEVICE.type})
    x, weight = torch.randn(2, 32, device=DEVICE), torch.randn(48, 32, device=DEVICE)
    assert ops._why_not_few_rows(x, weight) is None
    monkeypatch.setattr(measured, "prefers_library", lambda rows, weight, in_pairs: rows == 2)
    assert "measured faster" in (ops._why_not_few_rows(x, weight) or "")
    torch.testing.assert_close(ops.project(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


@on_gpu_alone
@pytest.mark.parametrize("in_pairs", [False, True])
def test_both_are_timed(in_pairs: bool) -> None:
    weight = torch.randn(4096, 1024, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 16, 64):
        found = measured._times(rows, weight, in_pairs)
        assert 0.5 < (found["kernel"] or 0) < 500 and 0.5 < (found["library"] or 0) < 500
