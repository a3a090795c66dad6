"""Python's own audit hook as a wall: works on every system, and gives clear errors before the kernel has to refuse.

Alone it stops careless code, not hostile code. Imported by the sandboxed process, so only the standard library.
"""

from __future__ import annotations

import os
import sys
from typing import Any

REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
    "os.startfile", "pty.", "ctypes.dlopen", "resource.setrlimit", "resource.prlimit", "signal.pthread_kill",
    "sys.addaudithook",
    # How a program could look into the frames of the thread that waits to report on it.
    "sys._current_", "sys.settrace", "sys.setprofile", "sys.monitoring.", "gc.get_",
)  # fmt: skip
ON_FILES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "shutil.",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def install(folder: str) -> bool:
    """Refuse network, processes, signals and writing outside `folder`. A hook cannot be taken away again."""
    home = os.path.realpath(folder)
    busy, refused, starts_with = False, REFUSED, str.startswith

    def inside(path: Any) -> bool:
        if isinstance(path, int):  # something already open
            return True
        whole = os.path.realpath(os.fsdecode(path))
        return whole == home or whole.startswith(home + os.sep) or whole == os.devnull

    def is_memory(path: Any) -> bool:  # wherever it lies: of a path within an open folder only the end is known here
        named = isinstance(path, str | bytes | os.PathLike)
        return named and os.path.basename(os.path.realpath(os.fsdecode(path))) == "mem"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        # Goes by names of this function alone: a module's could be set by the program.
        if starts_with(event, refused) and arguments[:1] != (None,):  # ctypes opens the program itself as None
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if busy:  # realpath raises events of its own
            return
        busy = True
        try:
            check(event, arguments)
        finally:
            busy = False

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if is_memory(path):
                raise PermissionError("a file named mem, as a process's memory is, is not opened in the sandbox")
            if path is not None and (flags or 0) & WRITING and not inside(path):
                raise PermissionError("writing outside the sandbox's folder is not allowed")
        elif event.startswith(ON_FILES):
            paths = [a for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike)]
            if not all(map(inside, paths)):
                raise PermissionError(f"{event} outside the sandbox's folder is not allowed")

    sys.addaudithook(hook)
    return True
