"""`python -m forerun.parallel RANK SIZE PORT DEVICE`: a process that holds a part of somebody's target."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

from forerun.errors import RankLost
from forerun.parallel.start import work


def main(rank: str, size: str, port: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(int(rank), int(size), int(port), torch.device(device))
    except RankLost:  # rank 0 has ended, and has said why
        os._exit(1)
    os._exit(0)  # without waiting for peers that hang


def _end_with_parent() -> None:
    """Standard input ends when the process at its other end does."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
