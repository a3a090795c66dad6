"""The compiler refuses things that the interpreter runs, so kernels are compiled here as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compile_layers", ["few"]),
        ("compile_layers", []),
        ("compile_layers", ["80"]),
        ("compile_layers", ["89"]),
        ("compile_verification", []),
    ],
    ids=["few", "all", "ampere", "ada", "verification"],
)
def test_kernels_compile_without_a_gpu(name: str, arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
