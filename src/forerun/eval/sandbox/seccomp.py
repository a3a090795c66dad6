"""A filter on system calls: no network, no processes, no signals to others, nothing that outlives the run.

Linux on x86-64 and ARM64.

Imported by the sandboxed process before anything else runs there, so it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
NO_NEW_PRIVILEGES, SET_FILTER, ALL_THREADS = 38, 1, 1
CLONE_THREAD = 0x10000
WRITE_ONLY, READ_WRITE, TRUNCATE = 0o1, 0o2, 0o1000
WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND
X32 = 0x40000000  # x86-64's second set of call numbers begins here
# fcntl's F_SETOWN, F_SETSIG and F_SETOWN_EX have the kernel signal any process that one names.
OWNER_COMMANDS = (8, 10, 15)
# ioctl's FIOSETOWN and SIOCSPGRP do the same; TIOCSCTTY and TIOCSTI take a terminal and type into it.
TERMINAL_COMMANDS = (0x8901, 0x8902, 0x540E, 0x5412)

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


@dataclass(frozen=True, slots=True)
class Calls:
    """Numbers of system calls on one architecture."""

    arch: int
    refused: tuple[int, ...]  # network, processes, signals, other processes' memory, ownership and modes of files
    changing: tuple[int, ...]  # names of files made, moved or removed: refused where Landlock does not watch them
    clone: int
    clone3: int
    prlimit: int
    seccomp: int
    fcntl: int
    ioctl: int
    opens: tuple[tuple[int, int], ...]  # (number, which argument holds the flags)


CALLS = {
    "x86_64": Calls(
        arch=0xC000003E,
        refused=(
            41, 53, 57, 58, 59, 322,  # socket, socketpair, fork, vfork, execve, execveat
            62, 200, 234, 129, 297, 424,  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
            101, 310, 311, 434, 425,  # ptrace, process_vm_readv, process_vm_writev, pidfd_open, io_uring_setup
            109, 112, 141, 160, 250, 272, 308, 317, 321, 298,  # setpgid, setsid, setpriority, setrlimit, keyctl,
            # unshare, setns, seccomp, bpf, perf_event_open
            165, 166, 76, 437,  # mount, umount2, truncate, openat2
            90, 91, 92, 93, 94, 260, 268, 452, 188, 189, 190,  # chmod, chown and setxattr in all their forms
            132, 235, 261, 280,  # utime, utimes, futimesat, utimensat
            29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71,  # System V: shm*, sem*, msg*
            240, 248, 249,  # mq_open, add_key, request_key
        ),
        changing=(82, 83, 84, 85, 86, 87, 88, 133, 258, 259, 263, 264, 265, 266, 316),
        clone=56, clone3=435, prlimit=302, seccomp=317, fcntl=72, ioctl=16, opens=((2, 1), (257, 2)),
    ),
    "aarch64": Calls(
        arch=0xC00000B7,
        refused=(
            198, 199, 221, 281,  # socket, socketpair, execve, execveat
            129, 130, 131, 138, 240, 424,  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
            117, 270, 271, 434, 425,  # ptrace, process_vm_readv, process_vm_writev, pidfd_open, io_uring_setup
            154, 157, 140, 164, 219, 97, 268, 277, 280, 241,  # as above
            40, 39, 45, 437,  # mount, umount2, truncate, openat2
            52, 53, 54, 55, 452, 5, 6, 7,  # chmod, chown and setxattr in all their forms
            88,  # utimensat
            194, 195, 196, 190, 191, 192, 193, 186, 187, 188, 189,  # System V: shm*, sem*, msg*
            180, 217, 218,  # mq_open, add_key, request_key
        ),
        changing=(33, 34, 35, 36, 37, 38, 276),
        clone=220, clone3=435, prlimit=261, seccomp=277, fcntl=25, ioctl=29, opens=((56, 2),),
    ),
}  # fmt: skip
CALLS["arm64"] = CALLS["aarch64"]


def install(*, files_are_watched: bool) -> bool:
    """Put the filter up for every thread of this process, for good. False where it cannot be."""
    calls = CALLS.get(platform.machine())
    if calls is None or platform.system() != "Linux":
        return False
    code = program(calls, files_are_watched=files_are_watched)
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
    memory = ctypes.create_string_buffer(packed, len(packed))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return bool(libc.syscall(calls.seccomp, SET_FILTER, ALL_THREADS, header) == 0)


def program(calls: Calls, *, files_are_watched: bool) -> list[Instruction]:
    """Load, compare, return. A call of another architecture kills; what is not named is allowed."""
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    code: list[Instruction] = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, calls.arch), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, X32), refuse]
    for number in calls.refused + (() if files_are_watched else calls.changing):
        code += _when(number, [refuse])
    # Without clone3, which hides its flags in memory, libraries turn to clone, whose flags can be looked at.
    code += _when(calls.clone3, [(RETURN, 0, 0, REFUSE | errno.ENOSYS)])
    code += _when(calls.clone, [*_argument(0), (ANY_BIT, 1, 0, CLONE_THREAD), refuse, (RETURN, 0, 0, ALLOW)])
    code += _when(calls.prlimit, _only_reading_own_limits(refuse))
    code += _when(calls.fcntl, _without(OWNER_COMMANDS, refuse))
    code += _when(calls.ioctl, _without(TERMINAL_COMMANDS, refuse))
    for number, place in calls.opens:
        code += _when(number, [*_argument(place), *(_truncating(refuse) if files_are_watched else _writing(refuse))])
    return [*code, (RETURN, 0, 0, ALLOW)]


def _when(number: int, then: Sequence[Instruction]) -> list[Instruction]:
    """`then` ends in a return, so the call's number is still loaded for those who come after."""
    return [(EQUAL, 0, len(then), number), *then]


def _argument(place: int, *, high: bool = False) -> list[Instruction]:
    """Half of an argument's 64 bits."""
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * place + 4 * high)]


def _without(commands: Sequence[int], refuse: Instruction) -> list[Instruction]:
    """All commands (a call's second argument, of which the kernel reads 32 bits) but these."""
    checks = [step for command in commands for step in ((EQUAL, 0, 1, command), refuse)]
    return [*_argument(1), *checks, (RETURN, 0, 0, ALLOW)]


def _writing(refuse: Instruction) -> list[Instruction]:
    """No opening for writing at all."""
    return [(ANY_BIT, 0, 1, WRITING), refuse, (RETURN, 0, 0, ALLOW)]


def _truncating(refuse: Instruction) -> list[Instruction]:
    """No truncating by a file that is not opened for writing: before its version 3, Landlock does not see that."""
    allow = (RETURN, 0, 0, ALLOW)
    return [
        (ANY_BIT, 1, 0, TRUNCATE),
        allow,
        (ANY_BIT, 2, 0, WRITE_ONLY),
        (ANY_BIT, 2, 0, READ_WRITE),
        refuse,  # neither
        (ANY_BIT, 1, 0, READ_WRITE),
        allow,  # one of them
        refuse,  # both, which is neither
    ]


def _only_reading_own_limits(refuse: Instruction) -> list[Instruction]:
    """prlimit(pid 0, resource, no new limit, ...)"""
    halves = (_argument(0), _argument(2), _argument(2, high=True))
    checks = [step for half in halves for step in (*half, (EQUAL, 1, 0, 0), refuse)]
    return [*checks, (RETURN, 0, 0, ALLOW)]
