"""Numba's `njit` and `cfunc`, whose compiled code is kept on disk for as long as no source of a kernel has changed.

Numba looks at the file that a function stands in. What it calls and the constants it was compiled with may stand in
others: after an update that changed those alone it would run the old code. So all of them are looked at here.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc, njit
from numba.core.caching import CacheImpl

__all__ = ["BESIDE", "cfunc", "njit"]

FOLDER = Path(__file__).parent
BESIDE = ("experts", "integer", "panels", "skinny")  # of `forerun.math`: whose constants are compiled into kernels
_NUMBAS_OWN = tuple(getattr(CacheImpl, "_locator_classes", ()))  # private: a Numba without it looks at one file again


@cache
def sources() -> bytes:
    """A digest of all that kernels are made of."""
    files = [*sorted(FOLDER.glob("*.py")), *(FOLDER.parents[1] / "math" / f"{name}.py" for name in BESIDE)]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).digest()


class KernelLocator:
    """Where Numba keeps a kernel, and what it must find unchanged to take it from there."""

    def __init__(self, locator: Any) -> None:
        self._locator = locator

    @classmethod
    def from_function(cls, function: Any, file: str) -> KernelLocator | None:
        """None for whatever is no kernel of ours."""
        if Path(file).parent != FOLDER or not Path(file).is_file():
            return None
        locators = (kind.from_function(function, file) for kind in _NUMBAS_OWN)
        return next((cls(locator) for locator in locators if locator is not None), None)

    def ensure_cache_path(self) -> None:
        self._locator.ensure_cache_path()

    def get_cache_path(self) -> Any:
        return self._locator.get_cache_path()

    def get_disambiguator(self) -> Any:
        return self._locator.get_disambiguator()

    def get_source_stamp(self) -> Any:
        return self._locator.get_source_stamp(), sources()


CacheImpl._locator_classes = [KernelLocator, *_NUMBAS_OWN]
