"""Two processes that need the same kernel: one compiles it, the other reads what that has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.compiling import compile_share

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


def test_workers_share_the_files_of_a_fresh_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    for name in ("src/one.py", "src/two.py", "tests/support.py", "tests/test_it.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("assert True\n", encoding="utf-8")

    def made(worker: str) -> set[str]:
        before = set(tmp_path.rglob("*.pyc"))
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        compile_share(pytestconfig, tmp_path)
        return {
            file.name.replace(f".{sys.implementation.cache_tag}", "") for file in {*tmp_path.rglob("*.pyc")} - before
        }

    assert made("gw0") == {"one.pyc", "support.pyc"}
    assert made("gw1") == {"two.pyc", f"test_it-pytest-{pytest.__version__}.pyc"}, "as pytest names it"
    assert made("gw0") == made("gw1") == set(), "they are there"
