"""Random numbers that are counted, not consumed: Philox4x32-10 keyed by seed, request, round, position and stream.

A number is a pure function of its key, so nothing depends on neighbours, chunking or what was drawn before, and a
kernel that computes the same words gets the same tokens. (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3".)
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.types import Keys, Rule

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# 32-bit words held in int64: a tensor, or on a CPU a numpy array, whose tiny operations cost a quarter of torch's.
Words = Any
Draws = tuple[tuple["RandomStream", int], ...]


class RandomStream(IntEnum):
    """What a random number is for. Numbers of different streams are independent.

    DRAFT, ACCEPT, FINAL and CHOICE belong to one round of a row: block verification looks at later tokens before it
    decides, so a number keyed by position alone would be met again by the next round and bend the law. TARGET belongs
    to an absolute position whatever the round, which is what the coupled rule is made of.
    """

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2
    TARGET = 3
    CHOICE = 4  # of a candidate at each drafted position, for rules that look at several


def uniforms(keys: Keys, draws: Draws) -> Tensor:
    """One uniform in [0, 1) with 53 bits for each (stream, position) of `draws`: [B, M] float64.

    The seed (64 bits) is the key; the counter words are (request id, round, position, stream), 32 bits each. For TARGET
    the round is 0 and the position counts from `keys.position`.
    """
    device = keys.seed.device
    absolute, relative, offsets, streams = _columns(draws, device)
    seed, request_id, round_, position = (
        _words(x).reshape(-1, 1) for x in (keys.seed, keys.request_id, keys.round, keys.position)
    )
    counter, key = _empty(4, seed.shape[0], len(draws), device), _empty(2, seed.shape[0], len(draws), device)
    counter[0], counter[1] = request_id, round_ * relative
    counter[2], counter[3] = offsets + position * absolute, streams
    key[0], key[1] = seed, seed >> 32
    high, low, *_ = _philox(counter, key, device)
    return _tensor(((high >> 5) << 26) + (low >> 6)).double() * 2.0**-53


def draft_uniforms(keys: Keys, width: int, rule: object) -> Tensor:
    """The numbers a drafter draws its tokens with: [B, width] float64.

    Under the coupled rule they are the target's own numbers at those positions, so that equal laws draw equal tokens.
    """
    return uniforms(keys, span(RandomStream.TARGET if rule is Rule.COUPLED else RandomStream.DRAFT, width))


@lru_cache(maxsize=256)
def span(stream: RandomStream, width: int) -> Draws:
    """Positions 0 .. width - 1 of one stream."""
    return tuple((stream, i) for i in range(width))


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10: counter [4, ...] and key [2, ...], words in the low 32 bits of int64 -> [4, ...]."""
    words = _philox(_words(counter), _words(key), counter.device)
    return torch.stack([_tensor(word) for word in words])


def _philox(counter: Words, key: Words, device: torch.device) -> tuple[Words, Words, Words, Words]:
    """Words (0, 2) and (1, 3) are laid end to end so that each step is one operation."""
    shape = counter.shape[1:]
    even, odd = _mix(counter[::2].reshape(-1), counter[1::2].reshape(-1), key.reshape(-1), device)
    even, odd = even.reshape(2, *shape), odd.reshape(2, *shape)
    return even[0], odd[0], even[1], odd[1]


def _mix(even: Words, odd: Words, key: Words, device: torch.device) -> tuple[Words, Words]:
    """Ten rounds. A 32 x 32 bit product may wrap into the sign bit of int64; its low 64 bits are right all the same.

    What lies above the low 32 bits of `odd` and `key` is dirt, and one mask a round cleans it.
    """
    factor, weyl, swap, shift, mask = _constants(even.shape[0] // 2, device)
    even = even & mask
    for _ in range(ROUNDS):
        product = (even * factor).take(swap)
        even, odd = ((product >> shift) ^ odd ^ key) & mask, product
        key = key + weyl
    return even, odd & mask


@lru_cache(maxsize=256)
def _constants(count: int, device: torch.device) -> tuple[Words, ...]:
    """Multipliers, key steps and the swap of the halves, written out in full: broadcasting costs more than it saves."""
    factor = torch.tensor(MULTIPLIERS, device=device).repeat_interleave(count)
    weyl = torch.tensor(WEYL, device=device).repeat_interleave(count)
    swap = torch.arange(2 * count, device=device).roll(count)
    shift, mask = torch.tensor(32, device=device), torch.tensor(MASK, device=device)
    return tuple(_words(x) for x in (factor, weyl, swap, shift, mask))


@lru_cache(maxsize=256)
def _columns(draws: Draws, device: torch.device) -> tuple[Words, ...]:
    absolute = [int(stream is RandomStream.TARGET) for stream, _ in draws]
    relative = [1 - flag for flag in absolute]
    offsets = [position for _, position in draws]
    streams = [int(stream) for stream, _ in draws]
    columns = torch.tensor([absolute, relative, offsets, streams], dtype=torch.int64, device=device)
    return tuple(_words(column) for column in columns)


def _empty(words: int, rows: int, columns: int, device: torch.device) -> Words:
    if device.type == "cpu":
        return np.empty((words, rows, columns), dtype=np.int64)
    return torch.empty(words, rows, columns, dtype=torch.int64, device=device)


def _words(tensor: Tensor) -> Words:
    return tensor.numpy() if tensor.is_cpu else tensor


def _tensor(words: Words) -> Tensor:
    return torch.from_numpy(words) if isinstance(words, np.ndarray) else words
