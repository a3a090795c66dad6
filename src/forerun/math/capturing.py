"""Questions to the device that only save work: while a CUDA graph is captured nobody can answer them."""

from __future__ import annotations

import torch
from torch import Tensor


def may_ask(tensor: Tensor) -> bool:
    """Whether a value of `tensor` can be read on the host now."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def any_of(mask: Tensor) -> bool:
    """Whether some entry may be True; where nobody can be asked, that is so."""
    return not may_ask(mask) or bool(mask.any())
