"""What replaces a reference of `math/` or a module of transformers where it measures faster."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from shutil import which
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INSTALL = "pip install numba"
NO_CACHE = "no locator available"  # what Numba says where it finds no folder to keep compiled kernels in
TRITON_DEVICES = {"cuda"}  # tests add "cpu", where Triton's interpreter stands in for a GPU


@cache
def why_not_numba() -> str | None:
    """Why the CPU kernels cannot be used here; None where they can. They need Numba, which needs no compiler."""
    try:
        from forerun.kernels.cpu import linear, stack  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; {INSTALL}"
    except RuntimeError as error:
        if NO_CACHE not in str(error):
            raise
        return f"{error}; set NUMBA_CACHE_DIR to a folder that may be written to"
    return None


def is_not_built(error: BaseException) -> bool:
    """Whether a kernel could not be compiled: what compilers raise is of their own classes."""
    return any(kind.__module__.split(".")[0] in ("numba", "llvmlite", "triton") for kind in type(error).__mro__)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one meanwhile: kernels and recordings go there, and each thread has a current one."""
    if device.type != "cuda":
        return nullcontext()
    from torch import cuda

    return cuda.device(device)


def why_not_triton(device: torch.device) -> str | None:
    """Why the Triton kernels cannot be used on a device; None where they can."""
    if device.type not in TRITON_DEVICES:
        return f"Triton kernels need a CUDA GPU, not {device.type!r}"
    if device.type == "cuda" and device.index is not None:
        from torch.cuda import current_device  # not above: the command line's help asks this package what there is

        if device.index != (current := current_device()):
            remedy = f"call torch.cuda.set_device({device.index})"
            return f"Triton kernels go to the current device, cuda:{current}: {remedy}"
    return _why_not_triton()


@cache
def _why_not_triton() -> str | None:
    from torch import version

    if version.hip is not None:  # torch calls an AMD GPU "cuda" too
        return "Triton kernels hold assembly for NVIDIA GPUs, not for AMD's"
    try:
        from triton import knobs
    except (ImportError, OSError) as error:
        return f"{error}; pip install triton (it comes with torch's CUDA builds)"
    finds_compiler = "CC" in os.environ or which("gcc") or which("clang")  # as Triton looks for one
    if not (finds_compiler or knobs.build.impl or knobs.runtime.interpret):
        return "Triton builds its launchers with a C compiler and finds none; install gcc or clang, or set CC"
    return None
