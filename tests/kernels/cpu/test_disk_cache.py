"""Compiled kernels are taken from disk only where nothing that they were made of has changed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numba")

import forerun
from forerun.kernels.cpu import activation, stack
from forerun.kernels.cpu.disk_cache import BESIDE, FOLDER, KernelLocator

PACKAGE = Path(forerun.__file__).parent
# The SiLU of 1 by a kernel of one file, which calls the exponential of another.
CALL = """
import sys
import numpy as np
from forerun.kernels.cpu.activation import silus
x = np.ones(4, np.float32)
silus(x)
print(x[0])
"""


def imported(home: str) -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of what kernels import from modules whose names begin like this."""
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(home):
                yield from ((file.name, str(node.module), name.name) for name in node.names)


def test_all_kernels_are_kept_by_it() -> None:
    makers = {
        file for file, _, name in imported("numba") if name in ("njit", "cfunc", "jit", "vectorize", "guvectorize")
    }
    assert makers == {"disk_cache.py"}
    for kernel in (stack.run_stack, stack.rotate, activation.silus):
        assert isinstance(kernel._cache._impl.locator, KernelLocator)


def test_constants_of_other_folders_are_looked_at() -> None:
    """Names in capitals, and the enumeration of activations, are numbers in compiled code."""
    constants = {module for _, module, name in imported("forerun.math.") if name.isupper() or name == "Activation"}
    assert constants == {f"forerun.math.{name}" for name in BESIDE}


@pytest.mark.slow
def test_a_kernel_is_compiled_again_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "forerun", ignore=shutil.ignore_patterns("__pycache__"))

    def run() -> float:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment.pop("NUMBA_CACHE_DIR", None)
        done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert run() == pytest.approx(0.7310586)
    kept = {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("activation.silus*.nbc")}
    assert kept and run() == pytest.approx(0.7310586)
    assert kept == {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("activation.silus*.nbc")}, "control"
    called = tmp_path / "forerun" / "kernels" / "cpu" / "exponential.py"
    text, ending = called.read_text(encoding="utf-8"), "    return e * _float_of_bits("
    assert ending in text
    called.write_text(text.replace(ending, "    return np.float32(3) + 0 * e * _float_of_bits("), encoding="utf-8")
    assert run() == pytest.approx(0.25)
