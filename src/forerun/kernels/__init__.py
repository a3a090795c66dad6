"""What replaces a reference of `math/` or a module of transformers where it measures faster."""

from __future__ import annotations

from functools import cache

INSTALL = "pip install numba"
TRITON_DEVICES = {"cuda"}  # tests add "cpu", where Triton's interpreter stands in for a GPU


@cache
def missing() -> str | None:
    """Why the CPU kernels cannot be used here; None where they can. They need Numba, which needs no compiler."""
    try:
        import forerun.kernels.cpu.linear
        import forerun.kernels.cpu.stack  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; {INSTALL}"
    return None


def triton_missing(device_type: str) -> str | None:
    """Why the Triton kernels cannot be used on a device; None where they can."""
    if device_type not in TRITON_DEVICES:
        return f"Triton kernels need a CUDA GPU, not {device_type!r}"
    return _triton_missing()


@cache
def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; pip install triton (it comes with torch's CUDA builds)"
    return None
