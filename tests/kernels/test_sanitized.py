"""The list of `make sanitize` names tests that exist, and a test of every file of kernels' tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
LISTED = (HERE / "sanitized.txt").read_text().splitlines()


@pytest.mark.slow
def test_every_test_is_found() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"@{HERE / 'sanitized.txt'}"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_file_is_there() -> None:
    """But for those about compiling and what is done without it, about the CPU's kernels, or about what only whole
    batches on a GPU show."""
    listed = {line.split("::")[0] for line in LISTED}
    kernels = {path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py") if path.parent.name != "cpu"}
    others = {"test_compile.py", "test_fallback.py", "test_sanitized.py", "verify/test_verify_gpu.py"}
    assert listed == {f"tests/kernels/{name}" for name in kernels - others}
