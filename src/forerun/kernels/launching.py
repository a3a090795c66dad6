"""What a launch must know of the device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MOST_COUNTED = 1 << 16  # results that several programs share, in one launch


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # under the interpreter: an H200's
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one it waits for has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def counters(device: torch.device) -> Tensor:
    """[MOST_COUNTED] int32 zeros, by which programs that share a result know who is the last.

    Whoever is the last puts its counter back to zero, in the same launch: nothing has to be cleared in between, and a
    recording that is given up has not run. One stream at a time may use them.
    """
    if device.type != "cuda":
        return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)
    # Not on a stream that may be recording: a graph would clear them when it is replayed, and not before.
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        made = torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)
    aside.synchronize()
    return made


def is_interpreted(tensor: Tensor) -> bool:
    """Triton's interpreter, which multiplies bfloat16 as if it were whole numbers."""
    return tensor.device.type == "cpu"
