"""Capabilities: what the kernel lets a process do because of who started it. As root that is everything.

Imported by the sandboxed process before anything else runs there, so it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import platform
import struct

VERSION = 0x20080522  # of the kernel's structure: two words of 32 bits for each of three sets


def drop() -> bool:
    """Give up every capability of this thread and of those it will start. False where it cannot be done.

    They do not come back: only running another program could bring them, and that is refused.
    """
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.capset(struct.pack("=Ii", VERSION, 0), bytes(24)) == 0)
