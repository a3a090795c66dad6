"""Targets are run in the dtype of their weights: `torch.autocast` around a call is refused.

Fused layers know nothing of it and modules would follow it, so what a text says would depend on which of them runs a
pass, and keys of two precisions would meet in one cache.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from forerun.errors import InvalidArgument


def refuse_autocast(model: PreTrainedModel, device: torch.device) -> None:
    """Raise where products of `model`, which is there, would be computed in another dtype than its own."""
    kind = device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return
    other = torch.get_autocast_dtype(kind)
    if other != model.dtype:
        raise InvalidArgument(
            f"torch.autocast to {other} is on, and Forerun runs this model in its own dtype, {model.dtype}: decode "
            f"within torch.autocast({kind!r}, enabled=False), or load the model with dtype={other}"
        )
