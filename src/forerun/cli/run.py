"""Decoding prompts of any length with somebody watching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from forerun.decoder import GenerateResult, SpeculativeDecoder
from forerun.engine import Progress
from forerun.kernels.compiling import compile_timer

# (index of the sequence in the call, what it gained)
OnProgress = Callable[[int, Progress], None]


def nothing(index: int, progress: Progress) -> None:
    """For callers who only want the result."""


def stay() -> bool:
    """For callers who never stop early."""
    return False


def run(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    keywords: dict[str, Any],
    on_progress: OnProgress = nothing,
    stopped: Callable[[], bool] = stay,
) -> GenerateResult:
    """Decode all prompts. When `stopped()` turns true, rows end after the round with what they have.

    What was compiled or recorded on the way is paid once and is no decoding: it is taken out of the result's seconds
    and told as `stats.seconds.capture`.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    stream = decoder.stream(ids, mask, **keywords)
    with compile_timer() as compiling:
        for progress in stream:
            for gained in progress:
                on_progress(gained.row, gained)
            if stopped():
                stream.close()
    done = stream.result
    once = done.stats.seconds.capture + compiling.seconds
    stats = replace(done.stats, seconds=replace(done.stats.seconds, capture=once))
    return replace(done, seconds=max(done.seconds - once, 0.0), stats=stats)
