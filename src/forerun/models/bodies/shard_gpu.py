"""A process's own part of a split model, run by the fused layers of a GPU."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from forerun.models.bodies.gpu import GpuBody
from forerun.models.bodies.shard import ShardBody, group_of


class ShardGpuBody(ShardBody, GpuBody):
    def __init__(self, whole: PreTrainedModel, part: PreTrainedModel) -> None:
        self.whole = whole
        super().__init__(part, group_of(whole))

    def _take_weights(self) -> None:
        """Weights that were laid side by side have moved: so have those of the whole model, or there were two."""
        super()._take_weights()
        parameters = dict(self.model.named_parameters())
        for name, weight in self.whole.base_model.named_parameters():
            if isinstance(weight, DTensor):  # norms are not, and have not moved
                weight._local_tensor = parameters[name].detach()
