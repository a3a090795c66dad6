"""Which linear layers choose experts: they are left as they are where others are quantised."""

from __future__ import annotations

from torch import nn


def routers(model: nn.Module) -> set[nn.Module]:
    """Linear layers inside modules that correct scores: such families compute them in float32.

    Routers of other families are no linear layers of torch's own.
    """
    choosing = (module for module in model.modules() if hasattr(module, "e_score_correction_bias"))
    return {child for module in choosing for child in module.children() if type(child) is nn.Linear}
