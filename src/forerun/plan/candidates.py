"""How much arithmetic a drafter's step takes, beside a step of its target."""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.drafters import Chain, DraftModel, EarlyExit, FeatureHead, ParallelHeads
from forerun.drafters.base import Drafter


def operations_ratio(drafter: Drafter | None, target: Any) -> float:
    """Leviathan's c-hat: multiplications of one draft step over one target step; copies and tables take none."""
    return _products_of(drafter, target) / products(target)


def products(module: nn.Module) -> int:
    """Multiplications per token in linear layers; attention's own, which grow with the context, are left out."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def _products_of(drafter: Drafter | None, target: Any) -> int:
    """Of a bound drafter."""
    if isinstance(drafter, Chain):  # in a draft that is drawn only the dearest of them takes part, most of the time
        return max(_products_of(part, target) for part in drafter.parts)
    if isinstance(drafter, DraftModel | EarlyExit):
        assert drafter.scorer is not None
        return products(drafter.scorer.model)
    if isinstance(drafter, FeatureHead | ParallelHeads):
        head = target.get_output_embeddings().weight
        words = len(head) if drafter.trunk.ids is None else len(drafter.trunk.ids)
        return products(drafter.trunk.head) + words * int(head.shape[1])
    return 0
