"""What keeps whole rounds from being recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.engine.device.choose import why_not
from forerun.types import Rule

ON_A_GPU: Any = SimpleNamespace(device=torch.device("cuda"))


@pytest.mark.parametrize("asked", ("auto", "on"))
def test_plain_rounds_are_recorded(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", asked)
    assert why_not(ON_A_GPU, None, Rule.TOKEN) is None


def test_drawing_by_torch_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "off")
    assert "FORERUN_KERNELS=off" in (why_not(ON_A_GPU, None, Rule.TOKEN) or "")


def test_rules_judged_step_by_step() -> None:
    assert "coupled" in (why_not(ON_A_GPU, None, Rule.COUPLED) or "")
