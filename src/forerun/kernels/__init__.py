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
