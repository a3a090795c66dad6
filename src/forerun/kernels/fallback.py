"""Kernels that turn out not to compile or not to launch here: told of once, and their references run from then on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from forerun.config import Kernels
from forerun.errors import ForerunWarning, kind_and_line
from forerun.kernels import is_not_built

P = ParamSpec("P")
T = TypeVar("T")

refused: set[str] = set()
"""Names of functions whose kernels are not tried again in this process. A kernel that fails for one shape fails in the
middle of a text: one that is tried for every other shape would fail there again and again."""


def or_reference(function: Callable[P, T]) -> Callable[P, T]:
    """A function that chooses by its argument `use` between a kernel and a reference, which takes over for good where
    the kernel is not to be had.

    Kernels that change what they are given do so in one launch: where that fails, nothing has been changed.
    """
    name, signature = function.__name__, inspect.signature(function)

    @wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> T:
        if name not in refused:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not (is_not_built(error) and _is_ours(error.__traceback__)):
                    raise
                _refuse(name, error)
        call = signature.bind(*args, **kwargs)
        call.arguments["use"] = Kernels.OFF
        return function(*call.args, **call.kwargs)

    return chosen


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an error has come through a kernel of ours: a user's law or rule may have compilers of its own."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module.startswith("forerun.kernels.") and module != __name__:
            return True
        trace = trace.tb_next
    return False


def _refuse(name: str, error: Exception) -> None:
    refused.add(name)
    what = f"the kernel of {name!r} could not be built ({kind_and_line(error)})"
    warnings.warn(f"{what}; its reference runs from now on, slower", ForerunWarning, stacklevel=4)
