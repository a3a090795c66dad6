"""Files in and out: a damaged one, a place that cannot be written and a full disk are each one error that names it."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, InvalidArgument, first_line

OPENERS: Mapping[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
FULL = (errno.ENOSPC, errno.EDQUOT)


def read_text(path: Path) -> str:
    """A UTF-8 file, unpacked where its name ends in .gz or .xz; a byte-order mark in front is no part of its text."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            text: str = file.read().decode("utf-8-sig")
            return text
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        ) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}); check the file, or fetch it again") from error


def parse_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` says what is wrong with any other, endless nesting included."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"not JSON: {error.msg} at {place}column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable JSON: it is nested too deeply") from error


def read_json(path: Path, remedy: str) -> Any:
    """The value in a JSON file; `remedy` says what to do about one that holds none."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {str(path)!r} ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise InvalidArgument(f"{str(path)!r} cannot be read ({error}); {remedy}") from error


def check_output(path: Path, option: str = "--output") -> None:
    """Raise unless a file can be written at `path`; found out before the work, not after it.

    Files are written beside their place and moved there, so the folder must let new ones in, and what is moved over
    must be an ordinary file: a device such as /dev/full would be replaced by one.
    """
    if path.is_dir():
        raise InvalidArgument(f"{option} {str(path)!r} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{option} {str(path)!r} is no ordinary file; name another")
    if path.is_file() and not os.access(path, os.W_OK):
        raise InvalidArgument(f"{option} {str(path)!r} cannot be written (Permission denied); name another file")
    _check_folder(path.parent, option, path)


def check_output_folder(folder: Path, option: str = "--output") -> None:
    """Raise unless files can be written in `folder`, or it can be made; it is not made here."""
    _check_folder(folder, option, folder)


def _check_folder(folder: Path, option: str, named: Path) -> None:
    """What is missing is tried out in a folder aside: a command that is refused later leaves nothing behind."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        if there == folder.absolute():
            with tempfile.TemporaryFile(dir=there):
                pass
        else:
            with tempfile.TemporaryDirectory(dir=there) as aside:
                (Path(aside) / folder.absolute().relative_to(there)).mkdir(parents=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument(
            f"{option} {str(named)!r}: cannot write there ({reason}); choose another place"
        ) from error


def write_whole(path: Path, write: Callable[[Path], Any], advice: str = "make room or choose another place") -> None:
    """Let `write` make a file beside `path`, then move it there: whoever looks sees the old file or the new one, whole.

    Its folder is made where it is missing. Whatever goes wrong, nothing half-written stays. The file gets the mode that
    the user's umask gives to new files.
    """
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{str(path)!r} is no ordinary file and cannot be replaced; name another")
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        beside.touch()
        mode = beside.stat().st_mode & 0o777
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.chmod(mode)  # safetensors makes files that their owner alone can read
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if is_disk_error(error):
            raise disk_error(path, error, advice) from error
        raise


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `folder`, which is missing or empty, once the block has ended well."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
            fresh = Path(place) / "fresh"
            fresh.mkdir()
            yield fresh
            set_usual_modes(fresh)
            os.replace(fresh, folder)
    except Exception as error:
        if is_disk_error(error):
            raise disk_error(folder, error, "make room or choose another place") from error
        raise


def replace_files(
    folder: Path, write: Callable[[Path], Any], last: str, advice: str = "make room or choose another place"
) -> None:
    """Let `write` make files aside, then move them into `folder`; its other files stay.

    Aside is within a folder that is there already: it may be mounted, or its parent another's. The file `last`, without
    which nobody reads the folder, leaves first and comes last: one that was interrupted half way is refused, not mixed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        within = folder if folder.is_dir() else folder.parent
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=within) as place:
            beside = Path(place)
            write(beside)
            set_usual_modes(beside)
            files = sorted(path.relative_to(beside) for path in beside.rglob("*") if path.is_file())
            names = [*(name for name in files if name != Path(last)), Path(last)]
            for name in names:  # a rename may reach the disk before what it names
                with (beside / name).open("rb+") as file:
                    os.fsync(file.fileno())
            folder.mkdir(exist_ok=True)
            (folder / last).unlink(missing_ok=True)
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(beside / name, folder / name)
    except Exception as error:
        if is_disk_error(error):
            raise disk_error(folder, error, advice) from error
        raise


def set_usual_modes(folder: Path) -> None:
    """Give the files of a folder the mode that the user's umask gives; safetensors lets their owner alone read them."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def is_disk_error(error: BaseException) -> bool:
    """Whether writing failed. torch hides the reason behind a RuntimeError, safetensors behind a kind of its own."""
    if isinstance(error, ForerunError):
        return False
    return isinstance(error, OSError | RuntimeError) or "I/O error" in str(error)


def disk_error(path: Path, error: BaseException, advice: str) -> ForerunError:
    """The error for a file that could not be written; what was there before is whole."""
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in FULL else (error.strerror or str(error))
    else:
        reason = f"the disk seems to be full ({first_line(error)})"
    return ForerunError(f"cannot write {str(path)!r}: {reason}. What was saved before is whole; {advice}")


def allow_many_open_files() -> None:
    """As many as the system lets us have: every stream of a server is one, and shells start programs with 1024."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a container may forbid even that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
