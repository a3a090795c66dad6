"""How far two computations of the same logits are apart, and how far rounding may take them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

LARGEST = 0.5  # deviation that is ever put down to rounding: beyond it, nothing could be told from a mistake


def deviation(ours: Tensor, theirs: Tensor) -> Tensor:
    """[n] root mean square of the difference over the vocabulary, relative to the spread of the model's own logits."""
    theirs = theirs[-len(ours) :].double()
    finite = theirs.isfinite()
    apart = torch.where(finite, ours.double() - theirs, 0.0)
    apart = torch.where(finite == ours.isfinite(), apart, torch.inf)
    count = finite.sum(-1)
    mean = torch.where(finite, theirs, 0.0).sum(-1, keepdim=True) / count[:, None]
    spread = torch.where(finite, theirs - mean, 0.0).square().sum(-1)
    return (apart.square().sum(-1) / spread.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def typical(deviations: Tensor, dtype: torch.dtype) -> float:
    """Of a row's positions in a pass. A mask, a position or a key that is wrong is wrong for nearly all of them.

    With 16 bits a router may send single tokens to other experts, which says nothing: hence the median there.
    """
    return float(deviations.max() if torch.finfo(dtype).bits >= 32 else deviations.median())


def surely_allowed(model: PreTrainedModel) -> float:
    """What rounding may do to any model's logits, relative to their spread, however little this one enlarges it.

    Every layer rounds, and errors of random signs grow with the square root of their number. Many modules compute in
    float32 whatever the model's dtype. There is room: with 32 bits mistakes are a thousand times larger than what is
    allowed, with 16 bits a few times.
    """
    bits = torch.finfo(model.dtype)
    layers: int = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 1
    unit = max(bits.eps, torch.finfo(torch.float32).eps) * math.sqrt(layers)
    return 512 * unit if bits.bits >= 32 else min(2 * unit, LARGEST)


def allowed(noise: Tensor, model: PreTrainedModel) -> float:
    """The same for this model: `noise` tells how much one rounding of the input has become at its output."""
    if torch.finfo(model.dtype).bits >= 32:
        return max(surely_allowed(model), 32 * float(noise.max()))
    return min(max(surely_allowed(model), 3 * float(noise.median())), LARGEST)
