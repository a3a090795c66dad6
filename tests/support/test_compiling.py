"""Two processes that need the same kernel: one compiles it, the other reads what that has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

KERNEL = """
from numba import njit

@njit(cache=True)
def inner(x):
    return x * x

@njit(cache=True)
def kernel(x):
    return inner(x) + inner(x + 1.0)
"""
PROGRAM = """
import sys
from kernel import inner, kernel
from numba.core.caching import Cache
from support.compiling import in_turns

def wait():
    print("ready", flush=True)
    sys.stdin.readline()

def load(cache, *arguments):
    Cache.load_overload = load_overload
    found = load_overload(cache, *arguments)
    wait()
    return found

load_overload = Cache.load_overload
if sys.argv[1] == "in turns":
    in_turns()
    wait()
else:
    Cache.load_overload = load
assert kernel(2.0) == 13.0
print(sum(sum(each.stats.cache_misses.values()) for each in (inner, kernel)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in turns", "at once"])
def test_a_kernel_is_compiled_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, at once: each has looked on disk before the other has written there, and compiles it."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}:{Path(__file__).parents[2] / 'src'}")
    command = [sys.executable, "-c", PROGRAM, way]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        for _ in range(2)
    ]
    for one in both:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in both:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    compiled = [int(one.communicate(timeout=600)[0]) for one in both]
    assert sum(compiled) == 2 if way == "in turns" else min(compiled) > 0
