"""Perplexity of a text by windows: half a window is context, the other half is scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.eval.methods import PLAIN
from forerun.models.scorer import Scorer

WHOLE = 256
"""Positions that are scored in one pass where the text is simply read."""
BLOCK = 8
"""Positions of a pass as verification has it: a token and a draft of seven."""
ROUNDING = 8.0
"""Two ways to compute a mean log-probability may part by so many units in the last place of the model's numbers."""
ROW = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of text; tokens from `first` on are scored."""

    tokens: tuple[int, ...]
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.first


def windows(tokens: Sequence[int], size: int) -> list[Window]:
    """Each scored token once, with at least half a window of context but at the text's very beginning."""
    half = size // 2
    if len(tokens) < size:
        raise InvalidArgument(f"the text has {len(tokens)} tokens and a window {size}; give more text or a smaller one")
    every = [Window(tuple(tokens[:size]), 1)]
    for start in range(half, len(tokens) - size + 1, half):
        every.append(Window(tuple(tokens[start : start + size]), size - half))
    return every


@torch.inference_mode()
def read(scorer: Scorer, window: Window, way: str) -> tuple[float, float]:
    """Minus the log-probability of the scored tokens, and seconds.

    Plainly in long passes; for the speculative way in short ones over the cache, as drafts are verified.
    """
    step = WHOLE if way == PLAIN else BLOCK
    started = time.perf_counter()
    scorer.admit(ROW)
    try:
        scorer.feed([ROW], [window.tokens[: window.first - 1]])
        total = 0.0
        for start in range(window.first - 1, len(window.tokens) - 1, step):
            block = window.tokens[start : min(start + step, len(window.tokens) - 1)]
            following = window.tokens[start + 1 : start + 1 + len(block)]
            total += _surprise(scorer.score([ROW], [block]), following)
    finally:
        scorer.release(ROW)
    return total, time.perf_counter() - started


def tolerance(dtype: torch.dtype, perplexity: float) -> float:
    """How far two perplexities may part by rounding alone."""
    return perplexity * ROUNDING * torch.finfo(dtype).eps


def _surprise(logits: Tensor, following: Sequence[int]) -> float:
    laws = torch.log_softmax(logits.float(), dim=-1)
    targets = torch.tensor(following, device=laws.device)
    return -laws.gather(1, targets[:, None]).double().sum().item()
