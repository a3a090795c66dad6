"""Triton's interpreter for the tests of kernels that call many small functions, made fast enough for them.

Import this before any kernel: Triton looks at the environment when one is defined. On a machine with a GPU nothing is
interpreted and the same tests run there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.interpreter import DEVICE, mend_loop_bounds

INTERPRETED = DEVICE.type == "cpu"

pytest.importorskip("triton")


def _mend_nested_calls() -> None:
    """A function called from a kernel patches the language all over again: once a launch is enough, and faster.

    Triton's own library lives in a module that sees `tl.core`, so that is patched with the first such call.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang
    done: set[int] = set()

    def once(fn: Any) -> Any:
        langs = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        fresh = langs - done
        done.update(fresh)
        return patch(fn) if fresh else None

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        once(self.fn)
        return self.rewrite()(*args, **kwargs)

    run: Any = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return run(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = launch


def _allow_wrapping() -> None:
    """Random numbers wrap around on purpose; checking every sum for it doubles the time."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    mend_loop_bounds()
    _mend_nested_calls()
    _allow_wrapping()
