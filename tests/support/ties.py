"""When may greedy outputs differ? Only where the model itself cannot tell which of two tokens is the better one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from forerun.measure.reference import difference
from support.tiny import check_stock


@torch.no_grad()
def deviation(model: Any, prompt: Sequence[int]) -> float:
    """How far logits of the same positions lie apart when they are computed one token at a time and eight at once."""
    check_stock(model)
    ids = torch.tensor([list(prompt)], device=model.device)
    return float((_in_steps(model, ids, 1) - _in_steps(model, ids, 8)).abs().max())


def _in_steps(model: Any, ids: torch.Tensor, step: int) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    parts = [model(ids[:, i : i + step], past_key_values=cache).logits[0] for i in range(0, ids.shape[1], step)]
    return torch.cat(parts)


@torch.no_grad()
def check_greedy(
    model: Any, prompt: Sequence[int], got: Sequence[int], want: Sequence[int], noise: float, label: str = ""
) -> bool:
    """True if `got` equals `want`, False where they part at a tie; anything else fails.

    Past a tie the two texts are different texts, so there is nothing left to compare.
    """
    found = difference(model, prompt, got, want, noise)
    if found is None:
        return True
    assert found.gap is not None, f"{label}: {len(got)} tokens instead of {len(want)}"
    told = (
        f"{label}: token {found.position} is {found.ours}, not {found.theirs}; gap {found.gap:.2g}, noise {noise:.2g}"
    )
    assert found.is_tie, told
    print(f"a tie, {told}")  # noqa: T201
    return False
