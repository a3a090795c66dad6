"""How much work Python code does, counted instead of timed: the same on every machine, whatever else runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, cast


def instructions(function: Callable[[], object]) -> int:
    """Bytecode instructions that a call takes, those of all it calls included. What C does is not seen."""
    count = _monitored(function) if sys.version_info >= (3, 12) else _traced(function)
    assert count, "nothing was counted: this Python counts instructions in another way"
    return count


def _traced(function: Callable[[], object]) -> int:
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


def _monitored(function: Callable[[], object]) -> int:
    """From Python 3.12 on, where a tracer that asks for instructions as late as above is told of some calls only."""
    count, monitoring = 0, cast(Any, sys).monitoring
    thread, event, tool = get_ident(), monitoring.events.INSTRUCTION, monitoring.OPTIMIZER_ID

    def counted(code: CodeType, offset: int) -> None:
        nonlocal count
        count += get_ident() == thread

    monitoring.use_tool_id(tool, "instructions")
    monitoring.register_callback(tool, event, counted)
    monitoring.set_events(tool, event)
    try:
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
    return count


def growth(make: Callable[[int], Callable[[], object]], size: int, factor: int = 4) -> float:
    """How many times as much work `factor` times the size is; what `make` does itself is not counted."""
    make(size)()  # what is imported or looked up once
    small, large = make(size), make(factor * size)
    return instructions(large) / instructions(small)
