"""A row's own changes to the logits, position by position along the draft: bias, penalties, processors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import SequenceBiasLogitsProcessor

from forerun import ops
from forerun.config import Kernels
from forerun.engine.bans import without_banned
from forerun.engine.request import LogitsProcessor, Request
from forerun.errors import InvalidArgument
from forerun.types import Adjuster


def adjuster(request: Request, output: Sequence[int], use: Kernels | None = None) -> Adjuster | None:
    """The row's adjuster, or None where the model's logits are used as they are. `output` is read when it is called."""
    if not (request.params.has_penalties or request.min_new_tokens or request.processors):
        return None
    forbid = sorted(request.stop_ids) if request.min_new_tokens else []

    def apply(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        before = [*output, *drafted[:first]]
        logits = ops.adjust(
            logits, request.prompt, before, drafted[first:], request.params,
            forbid=forbid, min_new_tokens=request.min_new_tokens, use=use,
        )  # fmt: skip
        history = [*request.prompt, *before]
        for processor in request.processors:
            logits = _processed(processor, history, drafted[first:], logits)
        return logits

    return apply


class AfterPads:
    """A processor for one row of a padded batch that counts from the batch's left edge, as in transformers."""

    def __init__(self, processor: LogitsProcessor, pads: Sequence[int]) -> None:
        self.processor, self.pads = processor, list(pads)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        pads = input_ids.new_tensor([self.pads]).expand(len(input_ids), -1)
        return self.processor(torch.cat([pads, input_ids], dim=1), scores)


def _processed(processor: LogitsProcessor, history: list[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
    """One processor at all positions: at once where it offers that or only forbids ids, else one by one."""
    if (along := getattr(processor, "along", None)) is not None:
        adjusted: Tensor = along(history, drafted, logits)
        return adjusted
    if (left := without_banned(processor, len(history), logits)) is not None:
        return left
    return torch.cat([_called(processor, [*history, *drafted[:i]], row[None]) for i, row in enumerate(logits)])


def _called(processor: LogitsProcessor, history: list[int], scores: Tensor) -> Tensor:
    """A processor sees the row's own unpadded history, as it would in plain decoding at batch 1."""
    before = _state(processor)
    adjusted = processor(torch.tensor([history], device=scores.device), scores.clone())
    if _state(processor) != before:
        raise InvalidArgument(
            f"logits processor {type(_own(processor)).__name__} changes its own state when called; a draft asks for "
            "positions that may be taken back, so only processors that depend on their arguments alone can be used"
        )
    return adjusted


def _own(processor: LogitsProcessor) -> LogitsProcessor:
    """The caller's, whatever it is wrapped in."""
    return processor.processor if isinstance(processor, AfterPads) else processor


def _state(processor: LogitsProcessor) -> Any:
    """The plain values a processor keeps: enough to notice counters and flags, cheap enough for every call."""
    processor = _own(processor)
    if isinstance(
        processor, SequenceBiasLogitsProcessor
    ):  # and banned words: tables made once from the vocabulary's size
        return None
    kept = getattr(processor, "__dict__", {})
    return {
        name: copy.copy(value)
        for name, value in kept.items()
        if isinstance(value, (int, float, str, list, dict, set, tuple))
    }
