"""Landlock: the kernel lets this process write beneath one folder and nowhere else. Linux 5.13 and later.

Imported by the sandboxed process before anything else runs there, so it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVILEGES = 38
BENEATH = 1
WRITE_FILE = 1 << 1
# Removing and making of every kind; reading and running stay as they are.
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
REFER, TRUNCATE = 1 << 13, 1 << 14  # known from version 2 and 3 on
NETWORK, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals: from version 4 and 6 on


def install(folder: str) -> bool:
    """Forbid writing, making and removing files everywhere but beneath `folder`. False where it cannot be done."""
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    changes = CHANGES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    attributes = _attributes(version, changes)
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    good = _allow(libc, ruleset, folder, changes) and _allow(libc, ruleset, os.devnull, WRITE_FILE)
    good = good and not libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return good


def _attributes(version: int, changes: int) -> bytes:
    """struct landlock_ruleset_attr, as long as this version knows it."""
    known = 3 if version >= 6 else 2 if version >= 4 else 1
    return struct.pack(f"={known}Q", *(changes, NETWORK, SCOPES)[:known])


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, changes: int) -> bool:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", changes, place)
        return bool(libc.syscall(ADD_RULE, ruleset, BENEATH, rule, 0) == 0)
    finally:
        os.close(place)
