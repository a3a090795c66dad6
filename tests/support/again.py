"""Compiled code once more: a module with what a test has changed in those it reads, or as another processor's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.binding
import numba
import pytest
from llvmlite import ir


def compiled_again(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """What it compiles is kept in `folder`, apart from the module's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    assert module.__file__ is not None
    name = f"{module.__name__.rpartition('.')[2]}_again"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, again)
    spec.loader.exec_module(again)
    return again


def assembly(triple: str, name: str, arguments: int, emit: Callable[[Any, Any], None]) -> str:
    """What LLVM makes for a processor of a function of so many whole numbers."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), "product")
    build = ir.IRBuilder(function.append_basic_block())
    emit(build, function.args)
    build.ret_void()
    parsed = llvmlite.binding.parse_assembly(str(module))
    parsed.verify()
    machine = llvmlite.binding.Target.from_triple(triple).create_target_machine(name)
    return str(machine.emit_assembly(parsed))
