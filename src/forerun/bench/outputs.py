"""Facts about outputs that need no reader: how much they repeat themselves, and whether two of them are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Rows = Sequence[Sequence[int]]

# Either logit may be off by the deviation between two ways to compute it; twice that for ways that were not tried.
SLACK = 4.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rows of a group whose text was compared with the baseline's."""

    identical: int
    ties: int  # part where two tokens are equally likely as far as the arithmetic can tell
    different: int


def repeated_share(rows: Rows, size: int = 4) -> float:
    """Share of `size`-grams that the same row already had: a model that goes in circles is easy to draft for."""
    total = sum(max(len(row) - size + 1, 0) for row in rows)
    distinct = sum(len({tuple(row[i : i + size]) for i in range(len(row) - size + 1)}) for row in rows)
    return 1 - distinct / total if total else 0.0


def compare(model: Any, prompts: Rows, expected: Rows, found: Rows) -> Agreement:
    """Greedy outputs of two methods, row by row."""
    counts = {"identical": 0, "ties": 0, "different": 0}
    for prompt, one, other in zip(prompts, expected, found, strict=True):
        counts[_verdict(model, prompt, one, other)] += 1
    return Agreement(**counts)


def _verdict(model: Any, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> str:
    if list(one) == list(other):
        return "identical"
    part = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if part is None:  # one is the beginning of the other, and all were to be equally long
        return "different"
    return "ties" if is_tie(model, [*prompt, *one[:part]], one[part], other[part]) else "different"


@torch.inference_mode()
def is_tie(model: Any, history: Sequence[int], one: int, other: int) -> bool:
    """Whether both tokens are the most likely one, as far as the model's own arithmetic is certain."""
    at_once, step = _two_ways(model, torch.tensor([history], device=model.device))
    deviation = (at_once - step).abs().max().item()
    resolution = 2 * torch.finfo(model.dtype).eps * at_once.abs().max().item()
    best = at_once.max().item()
    return best - at_once[[one, other]].min().item() <= max(SLACK * deviation, resolution)


def _two_ways(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last position's logits from one pass over everything, and from a pass over the last token alone."""
    at_once = model(ids).logits[0, -1].float()
    if ids.shape[1] == 1:
        return at_once, at_once
    past = model(ids[:, :-1], use_cache=True).past_key_values
    return at_once, model(ids[:, -1:], past_key_values=past, use_cache=True).logits[0, -1].float()
