"""Drafts from n-gram counts: the longest context that was counted, and a law on the few tokens that followed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.math.laws import warp
from forerun.types import LawParams

Integers = NDArray[np.integer]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ngrams:
    """Continuations of every context, the most frequent first (the lower id among equals).

    A context of tokens t1 (newest), t2, ... is the number (t1 + 1) + (t2 + 1) * (V + 1) + ..., so contexts of all
    lengths share one sorted tensor, a missing token is the digit 0, and the empty context is 0.
    """

    contexts: Tensor  # [N] int64, strictly ascending, contexts[0] == 0
    starts: Tensor  # [N + 1] int64, context n owns entries starts[n] to starts[n + 1]
    tokens: Tensor  # [M] int32
    counts: Tensor  # [M] int32, > 0
    powers: Tensor  # [order] int64: (V + 1) ** n
    order: int
    vocab_size: int
    most: int  # continuations of the richest context, S

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return sum(part.nbytes for part in (self.contexts, self.starts, self.tokens, self.counts))

    def to(self, device: torch.device) -> Ngrams:
        """The same on a device."""
        names = ("contexts", "starts", "tokens", "counts", "powers")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @cached_property
    def arrays(self) -> tuple[Integers, ...]:
        """The tensors as numpy has them, which handles few numbers in a quarter of torch's time."""
        return tuple(part.cpu().numpy() for part in (self.contexts, self.starts, self.tokens, self.counts, self.powers))


class NgramDraft(NamedTuple):
    """Tokens drawn one after the other, and the law of each."""

    tokens: Tensor  # [R, K] int64
    ids: Tensor  # [R, K, S] int64
    probs: Tensor  # [R, K, S] float32, 0 where a context has fewer continuations


def draft_ngrams(
    table: Ngrams,
    recent: Tensor,  # [R, W] int64, each row's last tokens, the last one last
    known: Tensor,  # [R] int64, how many of them there are
    params: LawParams,
    uniforms: Tensor,  # [R, K] float64
) -> NgramDraft:
    """K tokens a row, each drawn by inverse CDF from the continuations of what is there by then.

    The law is shaped by the row's own temperature, top-k, top-p and min-p. It is told in float32, as all laws are.
    """
    digits, numbers, row_params = digits_of(table, recent, known), uniforms.cpu().numpy(), _on_cpu(params)
    shape = (*numbers.shape, table.most)
    tokens, ids, probs = np.zeros(shape[:2], np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    rows = np.arange(len(numbers))
    for i in range(numbers.shape[1]):
        ids[:, i], weights = _continuations(table, find(table, digits)[0])
        law = _shape(weights, row_params)
        probs[:, i] = law
        tokens[:, i] = ids[rows, i, _draw(law, numbers[:, i])]
        digits = np.concatenate([tokens[:, i : i + 1] + 1, digits], axis=1)[:, : table.order - 1]
    device = recent.device
    return NgramDraft(*(torch.from_numpy(part).to(device) for part in (tokens, ids, probs)))


def digits_of(table: Ngrams, recent: Tensor, known: Tensor) -> Integers:
    """[R, order - 1] the newest tokens as digits, newest first, 0 from the first one on that the table cannot know."""
    width = table.order - 1
    newest = recent.cpu().numpy()[:, ::-1][:, :width]
    is_there = np.arange(newest.shape[1]) < known.cpu().numpy()[:, None]
    is_there &= (newest >= 0) & (newest < table.vocab_size)
    digits = np.zeros((len(newest), width), np.int64)
    digits[:, : newest.shape[1]] = np.where(np.logical_and.accumulate(is_there, axis=1), newest + 1, 0)
    return digits


def find(table: Ngrams, digits: Integers) -> tuple[Integers, Integers]:
    """Index of the longest known context of each row and its length, [R] each."""
    contexts, powers = table.arrays[0], table.arrays[4]
    wanted = pack(digits, powers[: table.order - 1])
    nearest = np.minimum(np.searchsorted(contexts, wanted), len(contexts) - 1)
    is_known = contexts[nearest] == wanted  # the empty context always is
    is_known[:, 1:] &= digits > 0
    length = (is_known * np.arange(table.order)).max(axis=1)
    return nearest[np.arange(len(digits)), length], length


def pack(digits: Integers, powers: Integers) -> Integers:
    """Digits [R, order - 1] -> the contexts of length 0, 1, ... as numbers, [R, order]."""
    contexts = np.zeros((len(digits), len(powers) + 1), np.int64)
    np.cumsum(digits * powers, axis=1, out=contexts[:, 1:])
    return contexts


def _continuations(table: Ngrams, index: Integers) -> tuple[Integers, Floats]:
    """Continuations of contexts [R] and their counts, [R, S] each; unused slots, the last ones, weigh 0."""
    _, starts, tokens, counts, _ = table.arrays
    entry = starts[index][:, None] + np.arange(table.most)
    used = entry < starts[index + 1][:, None]
    entry = np.minimum(entry, len(tokens) - 1)
    return tokens[entry], np.where(used, counts[entry], 0.0)


def _shape(weights: Floats, params: LawParams) -> Floats:
    """Counts [R, S] -> probabilities [R, S] under each row's temperature, top-k, top-p and min-p."""
    return np.asarray(warp(torch.from_numpy(weights).log(), params).softmax(dim=-1))


def _draw(probs: Floats, uniforms: Floats) -> Integers:
    """Inverse CDF over a few entries that never increase, so that those of probability 0 come last: [R, S] -> [R]."""
    running = probs.cumsum(axis=1)
    # A float64 below 1 times the total never rounds up to the total, so the last entry is not passed.
    passed: Integers = (running <= uniforms[:, None] * running[:, -1:]).sum(axis=1)
    return passed


def _on_cpu(params: LawParams) -> LawParams:
    return replace(
        params,
        temperature=params.temperature.cpu(),
        top_k=params.top_k.cpu(),
        top_p=params.top_p.cpu(),
        min_p=params.min_p.cpu(),
    )
