"""Answers that took a measurement, kept on disk, so that a choice costs its timing once.

One JSON file for a machine and the versions that matter: other hardware, another torch or a new Forerun measure anew.
A file that cannot be read or written is no reason to fail: then the timing is repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun.config import cache_folder
from forerun.errors import ForerunError
from forerun.files import parse_json, write_whole


class Remembered:
    """The answers of one kind of device, in a folder of the cache."""

    def __init__(self, folder: str, machine: Callable[[], Any], state: Callable[[], str] = str) -> None:
        """`machine`: what a measurement depends on; `state`: what else it depends on and may change meanwhile."""
        self._folder, self._machine, self._state = folder, machine, state
        self._known: dict[str, Any] = {}
        self._doubtful: dict[str, Any] = {}

    def get(self, key: str, measure: Callable[[], Any], is_sound: Callable[[], bool] = lambda: True) -> Any:
        """The answer to `key` from this process, from disk, or from `measure()`; answers are JSON values.

        One that is not sound by `is_sound()`, asked afterwards, serves this process alone.
        """
        if not self._known:
            self._known.update(self._read())
        if key not in self._known and key not in self._doubtful:
            answer = measure()
            if is_sound():
                self._known[key] = answer
                self._write()
            else:
                self._doubtful[key] = answer
        return self._known[key] if key in self._known else self._doubtful[key]

    def known(self) -> dict[str, Any]:
        """All answers so far, of this process and on disk; nothing is measured."""
        return {**self._doubtful, **self._read(), **self._known}

    def forget(self) -> None:
        """Drop what this process knows, for tests and after `state` has changed."""
        self._known.clear()
        self._doubtful.clear()

    def path(self) -> Path:
        """The file for this machine."""
        identity = json.dumps([self._machine(), self._state()], sort_keys=True)
        return cache_folder() / self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    def _read(self) -> dict[str, Any]:
        try:
            return dict(parse_json(self.path().read_text(encoding="utf-8"))["measured"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write(self) -> None:
        """Beside, then renamed; what another process has added meanwhile stays."""
        try:
            self.path().parent.mkdir(parents=True, exist_ok=True)
            content = {"machine": self._machine(), "measured": {**self._read(), **self._known}}
            text = json.dumps(content, indent=1, sort_keys=True)
            write_whole(self.path(), lambda beside: beside.write_text(text, encoding="utf-8"))
        except (OSError, ForerunError):
            return
