"""Triton's interpreter for kernel tests on a CPU. Import this before any kernel: Triton looks once, when one is defined.

On a machine with a GPU nothing is interpreted and the same tests run on it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


def _mend_loop_bounds() -> None:
    """Triton 3.6 turns a loop's bound into a number in a way that NumPy 2.4 no longer allows."""
    from triton.runtime import interpreter

    original: Any = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


if DEVICE.type == "cpu":
    _mend_loop_bounds()
