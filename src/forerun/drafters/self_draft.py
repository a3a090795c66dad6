"""The target's own weights, quantised, as the draft: no second model to find, and the text is the full target's."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from forerun.arguments import integer, refuse
from forerun.drafters.within_target import WithinTarget
from forerun.errors import InvalidArgument
from forerun.kernels.cpu.narrow import NarrowWeight, held
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.quantise import EIGHT_BITS, FOUR_BITS, check_scheme, matrices, quantise
from forerun.loading.rounding import round_weights
from forerun.models.quantised import method_of

SCHEMES = {8: EIGHT_BITS, 4: FOUR_BITS}
REMEDY = "must be 8 or 4"
WORTHWHILE = 0.75  # a copy must be at most this share of what it copies: decoding takes the time of reading weights


class SelfDraft(WithinTarget):
    """Drafts with a copy of the target whose weights have 8 or 4 `bits`, over the target's own cache.

    Each decoder makes a copy of its own, of the linear layers and, on a CPU, the embedding and head; `copy_bytes` is
    what it holds.
    """

    def __init__(self, bits: int = 8, *, stop_below: float | None = None) -> None:
        super().__init__(stop_below=stop_below)
        self.bits, self.copy_bytes = integer("bits", bits, remedy=REMEDY), 0
        if self.bits not in SCHEMES:
            refuse("bits", bits, REMEDY)

    def made_of(self, target: PreTrainedModel) -> PreTrainedModel:
        scheme, name = SCHEMES[self.bits], f"SelfDraft(bits={self.bits})"
        check_scheme(scheme, target.device, target.dtype, asked=name)
        if (method := method_of(target)) is not None:
            raise InvalidArgument(f"{name}: the target was quantised by {method} already; use another drafter")
        model = _sharing_weights(target)
        encoder = model.get_encoder() if target.config.is_encoder_decoder else None  # it reads with the target's
        weights = matrices(model, encoder)
        before, after = _bytes(weights), sum(weight.numel() for weight in weights) * self.bits // 8
        if after > WORTHWHILE * before:
            raise InvalidArgument(
                f"{name}: the target's weights are stored in {before / 2**20:.0f} MiB already, and a copy would take "
                f"{after / 2**20:.0f}, so it would draft no faster; load the target wider (on a CPU with "
                "dtype='float32'), or use another drafter, such as PromptLookup()"
            )
        if target.device.type == "cuda":
            round_weights(model, scheme, target.device, type(target).__name__)
        else:
            quantise(model, scheme, type(target).__name__, without=encoder, asked=name)
        self.copy_bytes = _bytes(weight for weight in matrices(model, encoder) if is_rounded(weight))
        return model


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules once more, over the same parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def is_rounded(weight: Tensor) -> bool:
    """Whether a weight is the copy's own."""
    return isinstance(weight, NarrowWeight | ScaledWeight)


def _bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight.num_bytes if isinstance(weight, ScaledWeight) else held(weight)[1] for weight in weights)
