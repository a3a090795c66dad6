"""How much work Python code does, counted instead of timed: the same on every machine, whatever else runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(function: Callable[[], object]) -> int:
    """Bytecode instructions that a call takes, those of all it calls included. What C does is not seen."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def growth(make: Callable[[int], Callable[[], object]], size: int, factor: int = 4) -> float:
    """How many times as much work `factor` times the size is; what `make` does itself is not counted."""
    make(size)()  # what is imported or looked up once
    small, large = make(size), make(factor * size)
    return instructions(large) / instructions(small)
