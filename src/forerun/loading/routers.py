"""Which linear layers choose experts: they are left as they are where others are quantised. And how many are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from torch import nn

CHOOSING = ("Router", "Gating", "Gate")  # how the names of routers' classes end
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # as configurations call it
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # likewise: those that a token is sent to
EXPERTS = 3  # dimensions of a tensor that holds a matrix of each expert


def routers(model: nn.Module) -> set[nn.Module]:
    """Linear layers that choose experts: a rounding may send a token to others, whose text is another.

    They lie in a module that is called a router, in one that corrects scores, or beside the experts, with an output for
    each. Many families' routers are no linear layers of torch's own and would not be quantised anyway.
    """
    counts = _numbers_of_experts(model)
    return {linear for module in model.modules() for linear in _choosing(module, counts) if type(linear) is nn.Linear}


def _choosing(module: nn.Module, counts: set[int]) -> Iterator[nn.Module]:
    name = type(module).__name__
    if name.endswith(CHOOSING) and not name.endswith("ForgetGate"):  # of recurrent layers
        yield from module.modules()
    if hasattr(module, "e_score_correction_bias"):
        yield from module.children()
    if hasattr(module, "experts"):
        yield from (child for child in module.children() if getattr(child, "out_features", None) in counts)


def _numbers_of_experts(model: nn.Module) -> set[int]:
    config: Any = getattr(model, "config", None)
    if config is None:
        return set()
    counts = (getattr(config.get_text_config(decoder=True), name, None) for name in COUNTS)
    return {count for count in counts if isinstance(count, int)}


def share_of_experts(module: nn.Module) -> float:
    """Of the experts that lie in one tensor: those that a token is sent to. 1 for a model without experts."""
    config: Any = getattr(module, "config", None)
    if config is None:
        return 1.0
    config = config.get_text_config(decoder=True)
    held, used = ([number for name in names if (number := getattr(config, name, None))] for names in (COUNTS, CHOSEN))
    if not held or not used:
        return 1.0
    chosen = fmean(used[0]) if isinstance(used[0], list) else used[0]  # a list has an entry for each layer
    return float(chosen / held[0])
