"""`python -m forerun.parallel RANK SIZE PORT DEVICE`: a process that holds a part of somebody's target."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import torch
import torch.distributed as dist

from forerun.errors import RankLost, kind_and_line
from forerun.parallel.start import work


def main(rank: str, size: str, port: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(int(rank), int(size), int(port), torch.device(device))
    except RankLost:  # rank 0 has ended, and has said why
        os._exit(1)
    except Exception as error:
        if not _is_of_peers(error):
            traceback.print_exc()
        _end(f"forerun: rank {rank} has ended: {kind_and_line(error)}")
    os._exit(0)  # without waiting for peers that hang


def _is_of_peers(error: Exception) -> bool:
    """Whether it tells of another rank that has gone: rank 0 says what that means, and where it was says nothing."""
    return isinstance(error, dist.DistError) or any(library in str(error) for library in ("gloo", "NCCL"))


def _end(message: str) -> None:
    """At once: an interpreter that ends waits for the thread that reads standard input, and complains of it."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)


def _end_with_parent() -> None:
    """Standard input ends when the process at its other end does."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
