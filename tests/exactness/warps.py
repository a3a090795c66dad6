"""What sampling parameters mean, written a second time: in float64, from the definitions and not from the library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Definition:
    """A `warp` for `joint_law`: logits [N, V] and whole histories [N, T] -> probabilities [N, V]."""

    prompt: int  # its length
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    end: int | None = None
    at_least: int = 0  # tokens before `end` may come

    def __call__(self, logits: Tensor, histories: Tensor) -> Tensor:
        rows = [self.row(line, history.tolist()) for line, history in zip(logits, histories, strict=True)]
        return torch.stack(rows)

    def row(self, logits: Tensor, history: list[int]) -> Tensor:
        output = history[self.prompt :]
        if self.end is not None and self.end in output:
            return F.one_hot(torch.tensor(self.end), len(logits)).double()
        scores = [self.score(token, float(value), history, output) for token, value in enumerate(logits)]
        if self.temperature == 0:
            return F.one_hot(torch.tensor(scores).argmax(), len(logits)).double()
        law = (torch.tensor(scores, dtype=torch.float64) / self.temperature).softmax(0)
        return self.truncated(law)

    def score(self, token: int, value: float, history: list[int], output: list[int]) -> float:
        value += self.bias.get(token, 0.0)
        if token in history:
            value = value * self.repetition if value < 0 else value / self.repetition
        value -= self.presence * (token in output) + self.frequency * output.count(token)
        return -math.inf if token == self.end and len(output) < self.at_least else value

    def truncated(self, law: Tensor) -> Tensor:
        if self.top_k:
            law = _only(law, law >= law.sort(descending=True).values[self.top_k - 1])
        if self.top_p < 1:
            ordered, ids = law.sort(descending=True)
            kept = ids[: 1 + int((ordered.cumsum(0) < self.top_p).sum())]
            law = _only(law, torch.zeros(len(law), dtype=torch.bool).index_fill(0, kept, True))
        return _only(law, law >= self.min_p * law.max())


def _only(law: Tensor, kept: Tensor) -> Tensor:
    law = law * kept
    return law / law.sum()
