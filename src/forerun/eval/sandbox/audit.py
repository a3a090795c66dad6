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
    "sys.addaudithook", "sys.remote_exec",
    # How a program could get hold of the step that follows it, or into an interpreter where no hook is.
    "gc.get_", "sys._current_", "sys.settrace", "sys.setprofile", "sys.monitoring.", "cpython.PyInterpreterState_New",
)  # fmt: skip
ON_FILES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LINKS = range(40)
"""So many in a row do systems follow."""


def install(folder: str, *, files_are_watched: bool = False) -> bool:
    """Refuse network, processes, signals and, unless the kernel does, writing outside `folder`; for good.

    The program may set names of modules, the builtins' included, and in a frame that it gets from a trace, from
    Python 3.13 on, variables of closures. So functions have what they need as defaults, which no frame leads to, keep
    nothing between calls, and call nothing that is written in Python but each other. A trace of an error that the hook
    has raised leads to those it calls: they are not to be changed, and no code of the program's is run beneath it.
    """
    status = os.stat(folder)
    home = status.st_dev, status.st_ino

    def end(
        path: str, readlink: Any = os.readlink, cut: Any = str.rpartition, strip: Any = str.rstrip, links: Any = LINKS
    ) -> str:
        """Where a path leads that ends in a link."""
        for _ in links:
            path = strip(path, "/") or path
            try:
                target = readlink(path)
            except (OSError, ValueError):
                break
            before, slash, _ = cut(path, "/")
            path = target if cut(target, "/")[1] and target[0] == "/" else before + slash + target
        return path

    def is_inside(path: str, home: Any = home, stat: Any = os.stat, cut: Any = str.rpartition) -> bool:
        """Whether a path is `home`; if not, go up from the folder that it is in until that is, or is its own parent."""
        before, slash, name = cut(path, "/")
        place, below = path if name in ("", ".", "..") else before + slash or ".", None
        try:
            status = stat(path)
            if (status.st_dev, status.st_ino) == home:
                return True
        except (OSError, ValueError):  # not there yet
            pass
        while True:
            try:
                status = stat(place)
            except (OSError, ValueError):
                return False
            identity = status.st_dev, status.st_ino
            arrived: bool = identity == home
            if arrived or identity == below:
                return arrived
            place, below = place + "/..", identity

    def hook(
        event: str, arguments: tuple[Any, ...], watched: bool = files_are_watched, refused: Any = REFUSED,
        on_files: Any = ON_FILES, writing: int = WRITING, null: str = os.devnull, starts_with: Any = str.startswith,
        cut: Any = str.rpartition, is_kind: Any = issubclass, kind: Any = type, number: Any = int, text: Any = str,
        raw: Any = bytes, plain: Any = str.__str__, decode: Any = bytes.decode, end: Any = end,
        is_inside: Any = is_inside, error: Any = PermissionError,
    ) -> None:  # fmt: skip
        if event == "ctypes.dlopen" and arguments[0] is None:  # ctypes opens the program itself
            return
        if starts_with(event, refused):
            raise error(f"{event} is not allowed in the sandbox")
        if starts_with(event, "object.__") and (arguments[0] is end or arguments[0] is is_inside):
            raise error("what the sandbox's hook calls is not changed")
        opens = event == "open"
        if not opens and (watched or not starts_with(event, on_files)):
            return
        for path in arguments[: 1 if opens else 2]:
            if is_kind(kind(path), text):  # isinstance would ask the object, whose answer is the program's
                name = end(plain(path))
            elif is_kind(kind(path), raw):
                name = end(decode(path, "utf-8", "surrogateescape"))
            elif path is None or kind(path) is number:  # open already, or no path but a mode
                continue
            else:  # what it names may be another when it is asked again
                raise error("a file is only opened by its name in the sandbox: give FileIO the str of a path")
            if opens and cut(name, "/")[2] == "mem":  # of a path within an open folder only the end is known here
                raise error("a file named mem, as a process's memory is, is not opened in the sandbox")
            changes = not opens or (arguments[2] or 0) & writing
            if changes and not watched and name != null and not is_inside(name):
                raise error(f"{event} outside the sandbox's folder is not allowed")

    sys.addaudithook(hook)
    return True
