"""Rows of token ids without their padding."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import InvalidArgument


def unpadded(ids: Tensor, mask: Tensor | None, name: str = "input_ids") -> list[list[int]]:
    """Each row's own tokens. Padding may be on either side; a hole in the middle is refused."""
    if not isinstance(ids, Tensor):
        raise InvalidArgument(f"{name} is a {type(ids).__name__}: give a tensor [batch, length]")
    if ids.ndim != 2:
        raise InvalidArgument(f"{name} has shape {tuple(ids.shape)}: give [batch, length]")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise InvalidArgument(f"attention_mask is {tuple(mask.shape)} and {name} {tuple(ids.shape)}: make them agree")
    prompts = []
    for row, (tokens, real) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        if "0" in "".join("01"[one] for one in real).strip("0"):
            raise InvalidArgument(f"attention_mask of row {row} has a hole in the middle; pad on the left or the right")
        prompts.append([token for token, one in zip(tokens, real, strict=True) if one])
        if not prompts[-1]:
            raise InvalidArgument(f"prompt {row} is empty: give at least one token (a begin-of-sequence id will do)")
    return prompts
