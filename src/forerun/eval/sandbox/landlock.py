"""Landlock: the kernel lets this process write beneath one folder, and read what Python and the system consist of.

Linux 5.13 and later.

Imported by the sandboxed process before anything else runs there, so it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVILEGES = 38
BENEATH = 1
WRITE_FILE, READ_FILE = 1 << 1, 1 << 2
# Removing and making of every kind; listing folders and running stay as they are.
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
REFER, TRUNCATE = 1 << 13, 1 << 14  # known from version 2 and 3 on
# Of the system. No /proc: there lie the memory of this process and what others were started with.
READABLE = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store", "/sys/devices/system/cpu",
    "/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/os-release", "/etc/passwd", "/etc/group",
    "/etc/nsswitch.conf", "/etc/hosts", "/etc/mime.types", "/etc/ssl/certs",
    "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
NETWORK, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals: from version 4 and 6 on


def install(folder: str) -> bool:
    """Forbid changes everywhere but beneath `folder`, and reading other files than Python's and the system's.

    False where it cannot be done.
    """
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    changes = CHANGES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    attributes = _attributes(version, changes | READ_FILE)
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    good = _allow(libc, ruleset, folder, changes | READ_FILE)
    good = good and _allow(libc, ruleset, os.devnull, WRITE_FILE | READ_FILE)
    for place in {*READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path}:
        with suppress(OSError):  # not there
            good = _allow(libc, ruleset, place, READ_FILE) and good
    good = good and not libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return good


def _attributes(version: int, files: int) -> bytes:
    """struct landlock_ruleset_attr, as long as this version knows it."""
    known = 3 if version >= 6 else 2 if version >= 4 else 1
    return struct.pack(f"={known}Q", *(files, NETWORK, SCOPES)[:known])


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> bool:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, place)
        return bool(libc.syscall(ADD_RULE, ruleset, BENEATH, rule, 0) == 0)
    finally:
        os.close(place)
