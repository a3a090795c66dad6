"""Rows of token ids without their padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.arguments import shown
from forerun.errors import InvalidArgument


def unpadded(
    ids: Tensor,
    mask: Tensor | None,
    name: str = "input_ids",
    vocab_size: int | None = None,
    mask_name: str = "attention_mask",
) -> list[list[int]]:
    """Each row's own tokens. Padding may be on either side; a hole in the middle is refused, and so is padding alone.

    With a `vocab_size`, a token that it does not hold is refused; what padding holds is nobody's business.
    """
    ids = check_ids(ids, name)
    real = (
        torch.ones_like(ids, dtype=torch.bool) if mask is None else check_mask(mask, tuple(ids.shape), name, mask_name)
    )
    prompts = []
    for row, (tokens, kept) in enumerate(zip(ids.tolist(), real.tolist(), strict=True)):
        if "0" in "".join("01"[one] for one in kept).strip("0"):
            raise InvalidArgument(f"{mask_name} of row {row} has a hole in the middle; pad on the left or the right")
        prompts.append([token for token, one in zip(tokens, kept, strict=True) if one])
        _check_tokens(prompts[-1], row, name, vocab_size)
    return prompts


def check_ids(ids: Any, name: str) -> Tensor:
    """A matrix of whole numbers that can be read."""
    check_tensor(ids, name, "give a tensor of token ids [batch, length], such as torch.tensor([[1, 2, 3]])")
    if ids.ndim != 2:
        raise InvalidArgument(f"{name} has shape {tuple(ids.shape)}: give [batch, length]")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InvalidArgument(f"{name} is of type {ids.dtype}: token ids are whole numbers; give torch.long")
    found: Tensor = ids.long()  # sequences hold what is generated, which a narrow type may not
    return found


def check_mask(mask: Any, shape: tuple[int, ...], name: str, mask_name: str = "attention_mask") -> Tensor:
    """As booleans: True where there is something. Masks are ones and zeros, of whatever type."""
    check_tensor(mask, mask_name, "give a tensor of ones for tokens and zeros for padding")
    if tuple(mask.shape) != shape:
        raise InvalidArgument(f"{mask_name} is {tuple(mask.shape)} and {name} {shape}: make them agree")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidArgument(
            f"{mask_name} holds other values than 0 and 1, as a mask that is added to scores does: give 1 for tokens "
            "and 0 for padding"
        )
    found: Tensor = mask.bool()
    return found


def check_tensor(value: Any, name: str, remedy: str) -> None:
    """A tensor that lies in memory as plain numbers."""
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, {shown(value)}: {remedy}")
    if value.is_meta:
        raise InvalidArgument(f"{name} is a meta tensor, which holds nothing: {remedy}")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "nested" if value.is_nested else "quantised" if value.is_quantized else str(value.layout)
        raise InvalidArgument(f"{name} is a {kind} tensor: {remedy}")


def _check_tokens(tokens: list[int], row: int, name: str, vocab_size: int | None) -> None:
    if not tokens:
        raise InvalidArgument(
            f"{name}: prompt {row} is empty: give at least one token (a begin-of-sequence id will do)"
        )
    if vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidArgument(f"{name}: token {bad} is outside the target's vocabulary of {vocab_size}")
