"""Listening in on an encoder: what it reads, and how long that takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AFTERWARDS = 1 / 30  # of a window, one second: where a draft finds that nobody speaks any more
FAINT = 1e-3  # above the quietest value, which padding has everywhere


@dataclass(slots=True)
class EncoderMonitor:
    """`with monitor.of(model): model.generate(...)` notes every call of the model's encoder."""

    features: Tensor | None = None  # [B, mels, frames] of its last call
    seconds: float = 0.0  # all calls together
    _started: float = 0.0

    @contextmanager
    def of(self, model: Any) -> Iterator[EncoderMonitor]:
        encoder = model.get_encoder()
        hooks = [
            encoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            encoder.register_forward_hook(self._end),
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, encoder: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.features = keywords.get("input_features", arguments[0] if arguments else None)
        self._started = self._now()

    def _end(self, encoder: Any, arguments: tuple[Any, ...], output: Any) -> None:
        self.seconds += self._now() - self._started

    def _now(self) -> float:
        if self.features is not None and self.features.is_cuda:  # a GPU is asked to finish before the clock is read
            torch.cuda.synchronize(self.features.device)
        return time.perf_counter()


def worth_reading(features: Tensor, num_states: int) -> int:
    """How many of a window's states a draft needs: those up to the last sound in `features` [mels, frames], and a few.

    A window is padded to thirty seconds. The target reads it all, or its text would be another.
    """
    heard = (features.amax(0) > features.min() + FAINT).nonzero()
    share = (int(heard[-1]) + 1) / features.shape[1] if len(heard) else 0.0
    return min(math.ceil((share + AFTERWARDS) * num_states), num_states)
