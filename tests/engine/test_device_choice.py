"""What keeps whole rounds, or anything at all, from being recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import kernels, ops
from forerun.config import Kernels
from forerun.engine import Engine, Request
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.device import choose
from forerun.engine.device.choose import describe, runner_for, why_not, why_nothing
from forerun.engine.mailbox import Mailbox
from forerun.lossy import Lenient
from forerun.models import static_pass
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.tiny import tiny_model


def on_a_gpu(use: Kernels) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), kernels=use, model=torch.nn.Linear(1, 1))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choose.kernels, "why_not_triton", lambda device: None)
    monkeypatch.setattr(static_pass, "why_not", lambda scorer: None)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("environment", ("auto", "off"))
def test_the_decoders_choice_counts_and_not_the_environment(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", environment)
    for use in (Kernels.AUTO, Kernels.ON):
        assert why_nothing(on_a_gpu(use)) is None
        assert why_not(on_a_gpu(use), None, Rule.TOKEN) is None
    off = on_a_gpu(Kernels.OFF)
    assert runner_for(off, None, Rule.TOKEN, lambda: 0.0) is None
    assert describe(None, off, None, Rule.TOKEN) == "nothing: kernels='off' leaves drawing and judging to torch"


def test_rules_judged_step_by_step() -> None:
    assert why_not(on_a_gpu(Kernels.AUTO), None, Rule.COUPLED) is None
    assert "lenient" in (why_not(on_a_gpu(Kernels.AUTO), None, Lenient(0.5)) or "")


def test_kernels_need_nvidia_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton builds what launches them; without one its first launch fails, in the middle of a text."""
    knobs = pytest.importorskip("triton.knobs")
    asked = kernels._why_not_triton.__wrapped__  # past its memory
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc or clang, or set CC" in asked()
    monkeypatch.setenv("CC", "/opt/cc")
    assert asked() is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in asked()


def test_kernels_go_to_the_current_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two: what lies on the other one is torch's, with the remedy."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "_why_not_triton", lambda: None)
    assert kernels.why_not_triton(torch.device("cuda")) is kernels.why_not_triton(torch.device("cuda:0")) is None
    assert "torch.cuda.set_device(1)" in (kernels.why_not_triton(torch.device("cuda:1")) or "")
    other = SimpleNamespace(device=torch.device("cuda:1"), kernels=Kernels.ON, model=torch.nn.Linear(1, 1))
    assert "set_device(1)" in (why_nothing(other) or "")  # type: ignore[arg-type]
    assert not ops._on_gpu(SimpleNamespace(is_cuda=True, device=torch.device("cuda:1")), Kernels.ON)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_thread", [False, True], ids=["step", "AsyncEngine"])
def test_steps_are_taken_on_the_targets_device(by_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is the current one of the thread that steps: it is each thread's own, and at first cuda:0."""
    current, stepped_on, over = [0], list[int](), Event()

    @contextmanager
    def device(entered: torch.device) -> Iterator[None]:
        before, current[0] = current[0], entered.index
        yield
        current[0] = before

    def step() -> list[Any]:
        stepped_on.append(current[0])
        engine.roster.waiting.clear()
        over.set()
        return []

    monkeypatch.setattr(torch.cuda, "device", device)
    engine = Engine(Scorer(tiny_model("llama")), None, Constant(0))
    monkeypatch.setattr(engine, "_step", step)
    monkeypatch.setattr(engine.target, "device", torch.device("cuda:1"))
    request = Request(prompt=(1, 2), max_new_tokens=1)
    if by_thread:
        with AsyncEngine(engine) as running:
            running.send(request, Mailbox())
            assert over.wait(20)
    else:
        engine.add(request)
        engine.step()
    assert stepped_on[0] == 1 and current == [0], "as it was"
