"""Where the CPU's kernels cannot be used, a reason is told instead of an error."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from forerun import kernels

SAYS = "cannot cache function 'add_at': no locator available for file 'memory.py'"


class Unimportable(ModuleType):
    """In the place of a package whose modules cannot be imported."""

    def __init__(self, message: str) -> None:
        super().__init__("forerun.kernels.cpu")
        self._message = message

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(self._message)


def test_a_machine_on_which_numba_may_write_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forerun.kernels.cpu", Unimportable(SAYS))
    told = kernels.why_not_numba.__wrapped__()
    assert told is not None and told.startswith(SAYS) and "set NUMBA_CACHE_DIR" in told


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forerun.kernels.cpu", Unimportable("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        kernels.why_not_numba.__wrapped__()


@pytest.mark.slow
def test_numba_says_it_in_these_words() -> None:
    pytest.importorskip("numba")
    program = "from forerun.kernels import why_not_numba; print(why_not_numba())"
    nowhere = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": ""}
    environment = {**os.environ, **nowhere, "NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "set NUMBA_CACHE_DIR" in done.stdout, done
