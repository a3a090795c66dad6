"""What encoder-decoder tests share: inputs of every family, and transformers' own answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from forerun.types import Source
from support.tiny import check_stock, ragged_prompts

VOCAB = 97
PAD = 7  # a real token, so that a pad that is read as text changes the answer


@lru_cache
def rows_of(family: str, num: int = 8, seed: int = 3) -> tuple[Tensor, ...]:
    """One source a row: token ids of different lengths, or features."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return tuple(torch.randn(num, 8, 48, generator=generator))
    if family == "moonshine":
        return tuple(torch.randn(num, 4000, generator=generator))
    return tuple(torch.tensor(ids) for ids in ragged_prompts(num, VOCAB, seed, longest=14))


def name_of(family: str) -> str:
    return {"whisper": "input_features", "moonshine": "input_values"}.get(family, "input_ids")


def source_of(row: Tensor) -> Source:
    return Source(features=row) if row.is_floating_point() else Source(ids=tuple(row.tolist()))


def batch_of(family: str, rows: Sequence[Tensor], side: str = "right") -> dict[str, Tensor]:
    """The keywords of `generate` for a padded batch."""
    if rows[0].is_floating_point():
        return {name_of(family): torch.stack(list(rows))}
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: PreTrainedModel, inputs: dict[str, Any], **keywords: Any) -> Tensor:
    """transformers' own greedy sequences; Whisper's own `generate` only wraps this one with rules about speech."""
    check_stock(model)
    out: Tensor = GenerationMixin.generate(model, **inputs, **{"do_sample": False, **keywords})
    return out


@torch.no_grad()
def recomputed(model: PreTrainedModel, family: str, row: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [n, V] of a plain forward of one row without any cache."""
    check_stock(model)
    ids = torch.tensor([list(tokens)])
    logits: Tensor = model(**batch_of(family, [row]), decoder_input_ids=ids, use_cache=False).logits[0]
    return logits
