"""How many bytes of floats all tensors hold, to see what is wide while a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def wide_bytes() -> int:
    """Of memory that newer tensors of floats hold, each piece once; what is expanded holds one number."""
    return sum({memory.data_ptr(): memory.nbytes() for memory in _memories()}.values())


@contextmanager
def older_ones_unseen() -> Iterator[None]:
    """Looking at all objects takes a tenth of a second each time: what is there already is not listed."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _memories() -> Iterator[torch.UntypedStorage]:
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.is_floating_point() and not each.is_meta:
            yield each.untyped_storage()
