"""Prompts of several lengths as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(
    prompts: Sequence[Sequence[int]], side: str = "left", device: str = "cpu", *, pad: int = 7
) -> tuple[Tensor, Tensor]:
    """Ids and mask. Pads are a real token id, so that a pad that is read as text changes the answer."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids.to(device), mask.to(device)


def padded_inputs(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The same as the keywords of `generate`, padded with 0 for calls that say `pad_token_id=0`."""
    ids, mask = padded(prompts, pad=0)
    return {"input_ids": ids, "attention_mask": mask}
