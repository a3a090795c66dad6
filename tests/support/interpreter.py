"""Triton's interpreter for kernel tests on a CPU; with a GPU nothing is interpreted and the same tests run there.

`conftest` imports this before anything that may import Triton, which looks at the environment once and for all.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

on_gpu_alone = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def kernel_tests() -> list[pytest.MarkDecorator]:
    """The marks of a file that tests Triton kernels, wherever they run: `pytestmark = kernel_tests()`."""
    if DEVICE.type == "cuda":
        return [pytest.mark.gpu]
    mend_loop_bounds()
    return []


@cache
def mend_loop_bounds() -> None:
    """Triton 3.6 turns a loop's bound into a number in a way that NumPy 2.4 no longer allows."""
    from triton.runtime import interpreter

    original: Any = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
