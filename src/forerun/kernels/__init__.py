"""What replaces a reference of `math/` or a module of transformers where it measures faster."""

from __future__ import annotations

from functools import cache

INSTALL = "pip install numba"
TRITON_DEVICES = {"cuda"}  # tests add "cpu", where Triton's interpreter stands in for a GPU


@cache
def why_not_numba() -> str | None:
    """Why the CPU kernels cannot be used here; None where they can. They need Numba, which needs no compiler."""
    try:
        from forerun.kernels.cpu import linear, stack  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; {INSTALL}"
    return None


def why_not_triton(device_type: str) -> str | None:
    """Why the Triton kernels cannot be used on a device; None where they can."""
    if device_type not in TRITON_DEVICES:
        return f"Triton kernels need a CUDA GPU, not {device_type!r}"
    return _why_not_triton()


@cache
def _why_not_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; pip install triton (it comes with torch's CUDA builds)"
    return None
