"""What replaces a reference of `math/` or a module of transformers where it measures faster."""

from __future__ import annotations

from functools import cache

INSTALL = "pip install numba"


@cache
def missing() -> str | None:
    """Why the CPU kernels cannot be used here; None where they can. They need Numba, which needs no compiler."""
    try:
        import forerun.kernels.cpu.linear
        import forerun.kernels.cpu.stack  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; {INSTALL}"
    return None


@cache
def triton_missing() -> str | None:
    """Why the kernels for a GPU cannot be used here; None where they can. Triton comes with torch on Linux."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install triton"
    return None
