"""Ids a row must not emit, where that is all its processors do: a device can ban them by itself, round after round.

Encoder-decoder models come with such lists in their configuration, Whisper with two, so nearly every row of theirs has
processors that say no more than this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from forerun.engine.request import Request
from forerun.math.transfer import to_device

FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Bans:
    """What is forbidden, and where in the output nothing else is asked for: from `since` on and before `until`."""

    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()  # as the first token of the output
    since: int = 0
    until: int = FOREVER

    def and_also(self, other: Bans) -> Bans:
        return Bans(
            tuple(sorted({*self.never, *other.never})),
            tuple(sorted({*self.not_first, *other.not_first})),
            max(self.since, other.since),
            min(self.until, other.until),
        )


def bans_of(request: Request) -> Bans | None:
    """All that a request's processors do to the logits; None where they do more than forbid ids."""
    if request.biases:
        return None
    bans = [_ban(processor, len(request.prompt)) for processor in request.processors]
    known = [ban for ban in bans if ban is not None]
    return reduce(Bans.and_also, known, Bans()) if len(known) == len(bans) else None


def forbidden(request: Request) -> frozenset[int]:
    """Ids that cannot be the first token of the output, as far as that follows from the request alone."""
    bans = [_ban(processor, len(request.prompt)) for processor in request.processors]
    ids = {token for ban in bans if ban is not None for token in (*ban.never, *ban.not_first)}
    return frozenset(ids | {token for token, bias in request.params.logit_bias.items() if bias == -math.inf})


def without_banned(processor: Any, seen: int, logits: Tensor) -> Tensor | None:
    """`logits` [n, V] after `seen` tokens and on, as a processor leaves them that forbids ids; None for all others."""
    kind = type(processor)
    if kind is SuppressTokensLogitsProcessor:
        place, ids = slice(None), processor.suppress_tokens
    elif kind is SuppressTokensAtBeginLogitsProcessor:
        first = processor.begin_index - seen
        place, ids = slice(first, first + 1) if first >= 0 else slice(0), processor.begin_suppress_tokens
    else:
        return None
    left = logits.clone()
    known = ids[(ids >= 0) & (ids < logits.shape[1])]  # others forbid nothing
    left[place, known if known.is_cuda else to_device(known, logits.device)] = -torch.inf
    return left


def _ban(processor: Any, prompt: int) -> Bans | None:
    """What one processor forbids behind a prompt of so many tokens. Classes derived from these may do anything."""
    kind = type(processor)
    if kind is SuppressTokensLogitsProcessor:
        return Bans(never=_ids(processor.suppress_tokens))
    if kind is NoBadWordsLogitsProcessor and all(len(word) == 1 for word in processor.sequence_bias):
        return Bans(never=tuple(sorted(word[0] for word in processor.sequence_bias)))
    if kind is SuppressTokensAtBeginLogitsProcessor:
        if processor.begin_index == prompt:
            return Bans(not_first=_ids(processor.begin_suppress_tokens))
        return Bans(since=processor.begin_index - prompt + 1)
    if kind is ForcedBOSTokenLogitsProcessor:
        return Bans(since=2 - prompt)
    if kind is ForcedEOSTokenLogitsProcessor:
        return Bans(until=processor.max_length - 1 - prompt)
    return None


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(sorted({token for token in values.tolist() if token >= 0}))
