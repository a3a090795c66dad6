"""What a launch must know of the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of what kernels read


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # under the interpreter: an H200's
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one it waits for has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may be launched before those ahead of it have ended, and then waits for them itself.

    It touches nothing that a kernel writes before it has waited, and asking for weights meanwhile was measured slower
    (docs/log.md). Large kernels let the next one come when their sums are made: its programs would take their places.
    """
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def needs_upcast(tensor: Tensor) -> bool:
    """Whether products of this must be of float32: Triton's interpreter multiplies bfloat16 as if it were integers."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16
