"""A row's own changes to the logits, position by position along the draft: bias, penalties, processors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import SequenceBiasLogitsProcessor

from forerun import ops
from forerun.engine.request import LogitsProcessor, Request
from forerun.errors import InvalidArgument
from forerun.types import Adjuster


def adjuster(request: Request, output: Sequence[int]) -> Adjuster | None:
    """The row's adjuster, or None where the model's logits are used as they are. `output` is read when it is called."""
    if not (request.params.has_penalties or request.min_new_tokens or request.processors):
        return None
    forbid = sorted(request.stop_ids) if request.min_new_tokens else []

    def apply(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        before = [*output, *drafted[:first]]
        logits = ops.adjust(
            logits, request.prompt, before, drafted[first:], request.params,
            forbid=forbid, min_new_tokens=request.min_new_tokens,
        )  # fmt: skip
        if not request.processors:
            return logits
        histories = ([*request.prompt, *before, *drafted[first : first + i]] for i in range(len(logits)))
        return torch.cat([_process(request.processors, h, logits[i]) for i, h in enumerate(histories)])

    return apply


def _process(processors: Sequence[LogitsProcessor], history: list[int], scores: Tensor) -> Tensor:
    """Each processor sees the row's own unpadded history, as it would in plain decoding at batch 1."""
    ids = torch.tensor([history], device=scores.device)
    row = scores[None].clone()
    for processor in processors:
        before = _state(processor)
        row = processor(ids, row)
        if _state(processor) != before:
            raise InvalidArgument(
                f"logits processor {type(processor).__name__} changes its own state when called; a draft asks for "
                "positions that may be taken back, so only processors that depend on their arguments alone can be used"
            )
    return row


def _state(processor: LogitsProcessor) -> Any:
    """The plain values a processor keeps: enough to notice counters and flags, cheap enough for every call."""
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
