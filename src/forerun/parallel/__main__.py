"""`python -m forerun.parallel RANK SIZE PORT DEVICE`: a process that holds a part of somebody's target."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import torch

from forerun.parallel.start import as_follower, work


def main(rank: str, size: str, port: str, device: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    as_follower(int(rank), partial(work, int(rank), int(size), int(port), torch.device(device)))


def _end_with_parent() -> None:
    """Standard input ends when the process at its other end does."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
