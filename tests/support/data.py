"""Where the test data lies. It is not part of the repository: tests that need it are skipped where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "FORERUN_TEST_DATA"


def data_folder() -> Path:
    """$FORERUN_TEST_DATA, or `shared/data` beside the checkout."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    return Path(__file__).resolve().parents[3] / "shared" / "data"


def lack_of(*names: str) -> str:
    """Why tests that read these files or folders cannot run; empty when they can."""
    missing = [name for name in names if not (data_folder() / name).exists()]
    return f"no {', '.join(missing)}; set {VARIABLE} to the folder that has it" if missing else ""


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test where one of these is not in the data folder."""
    reason = lack_of(*names)
    return pytest.mark.skipif(bool(reason), reason=reason)
