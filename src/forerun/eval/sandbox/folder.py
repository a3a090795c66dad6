"""The folder a program may write to: how much is in it, and how to get rid of it, whatever was built there."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import warnings
from contextlib import suppress

from forerun.errors import ForerunWarning

DISK_BYTES = 32 << 20
ENTRY_BYTES = 4096
"""What a file or a folder takes up beside its content, so that empty ones are not free."""


def usage(folder: str) -> int:
    """Bytes beneath a folder that may change while one looks; more than `DISK_BYTES` if it is too deep to look into."""
    total, waiting = 0, [folder]
    while waiting and total <= DISK_BYTES:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    total += ENTRY_BYTES
                    with suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return DISK_BYTES + 1
    return total


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, without following links; warns of what will not go.

    Folders within folders are moved up to the top one by one, so neither Python's depth of calls nor the length of a
    path sets a limit.
    """
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove_entry(top, name, top)
        finally:
            os.close(top)
        os.rmdir(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed: {error}; remove it by hand", ForerunWarning, stacklevel=3)


def _remove_entry(place: int, name: str, top: int) -> None:
    """Remove a file, or a folder whose own folders go to `top`."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=place)
        return
    os.chmod(name, stat.S_IRWXU, dir_fd=place)  # it may have been made with no rights at all
    if place != top:
        os.rename(name, secrets.token_hex(16), src_dir_fd=place, dst_dir_fd=top)
        return
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        for within in os.listdir(inner):
            _remove_entry(inner, within, top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=place)
