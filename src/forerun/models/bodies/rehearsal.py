"""Passes that are run for what they leave behind, kernels and memory, and not for what they say.

Before a pass is recorded it is run once: while a recording is under way nothing may be compiled, loaded or measured.
Layers of one kind launch the same kernels, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from forerun.math.scaled import RoundedWeight

ALIGNMENT = 16  # bytes; Triton compiles kernels anew for addresses that are no multiple of it
VALUES = (bool, int, float, str, Enum, torch.dtype, torch.device)
_is_under_way: ContextVar[bool] = ContextVar("rehearsal", default=False)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Bodies that can leave out layers whose kind was there already, and what a pass says is worthless."""
    before = _is_under_way.set(True)
    try:
        yield
    finally:
        _is_under_way.reset(before)


def is_rehearsal() -> bool:
    return _is_under_way.get()


def layers_of_each_kind(layers: Sequence[object]) -> frozenset[int]:
    """Places of layers that together launch all that all of them do: the first of a kind behind each other kind.

    The last one is among them: what it leaves to be added is added by other launches.
    """
    kinds = [None, *map(kind_of, layers)]
    first = {pair: place for place, pair in reversed(list(enumerate(pairwise(kinds))))}
    return frozenset((*first.values(), len(layers) - 1))


def kind_of(thing: Any) -> Any:
    """Equal for two things only if kernels cannot tell them apart but by their addresses and their numbers."""
    if isinstance(thing, RoundedWeight):
        return thing.scheme, kind_of(thing.raw), kind_of(thing.scales)
    if isinstance(thing, Tensor):
        return thing.dtype, tuple(thing.shape), thing.stride(), thing.data_ptr() % ALIGNMENT == 0
    if isinstance(thing, nn.Module):
        return type(thing), thing.extra_repr(), tuple(map(kind_of, thing.parameters()))
    if is_dataclass(thing):
        return type(thing), tuple(kind_of(getattr(thing, field.name)) for field in fields(thing))
    if isinstance(thing, MethodType):
        return thing.__func__, kind_of(thing.__self__)
    if isinstance(thing, partial):
        return (
            kind_of(thing.func),
            kind_of(thing.args),
            tuple((name, kind_of(value)) for name, value in thing.keywords.items()),
        )
    if isinstance(thing, tuple | list):
        return type(thing), tuple(map(kind_of, thing))
    if thing is None or isinstance(thing, VALUES):
        return thing
    return id(thing)  # nothing is known of it
