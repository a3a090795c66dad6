"""Numbers of the host as tensors, and on a device without waiting for what the device is doing.

A copy from ordinary memory first waits until everything that was launched before it is over: the host, which could have
launched the next pass meanwhile, launches nothing, and then the device waits for the host. From page-locked memory the
copy is one more launch. That memory is new each time: its allocator keeps it until the copy has happened.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def int64(numbers: Iterable[int]) -> Tensor:
    """[N], eight times as fast as `torch.tensor`, which asks every number of a long prompt what it is."""
    return torch.from_numpy(np.fromiter(numbers, np.int64))


def float64(numbers: Iterable[float]) -> Tensor:
    """[N], the same for other numbers."""
    return torch.from_numpy(np.fromiter(numbers, np.float64))


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A host tensor as one of `device`; itself, where that is the host."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def copy_into(place: Tensor, numbers: Tensor) -> None:
    """A host tensor into one that is there."""
    place.copy_(numbers.pin_memory() if place.is_cuda else numbers, non_blocking=True)
