"""A process's own part of a split model, run by fused layers: sums meet twice a layer, and nowhere else.

A part is a model of the same family with fewer heads and a narrower MLP, over this process's weights where they lie. It
is described as any model is; only what attention and the MLP would add to the hidden states has to be summed up first.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from forerun.models.bodies import readers
from forerun.models.bodies.described import DescribedBody


def local_part(model: PreTrainedModel, why_not: Callable[[PreTrainedModel], str | None]) -> PreTrainedModel | None:
    """The headless model that this process holds; None where it is not a smaller one of a family that is proven, or
    where the body that is to run it says why not."""
    config, processes = deepcopy(model.config), group_of(model).size()
    if config.model_type not in readers.PROVEN:  # others norm, add or multiply what has to be summed up first
        return None
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count, rest = divmod(getattr(config, name), processes)
        if rest:
            return None
        setattr(config, name, count)
    weights = {name: _local(weight) for name, weight in model.base_model.named_parameters()}
    config.vocab_size, config.pad_token_id = len(_local(model.get_input_embeddings().weight)), None
    with torch.device("meta"):
        part: Any = type(model.base_model)(config)
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in part.named_parameters()}:
        return None
    if any(name.endswith((".o_proj.bias", ".down_proj.bias")) for name in weights):
        return None  # every process would add it
    part.load_state_dict(weights, assign=True)
    part.rotary_emb = model.base_model.rotary_emb  # no weights, but frequencies
    headless: PreTrainedModel = part.eval()
    return headless if why_not(headless) is None else None


def _local(weight: Tensor) -> Tensor:
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.detach()


CAPTURABLE = {"nccl"}
"""Backends of process groups whose sums can be part of a CUDA graph."""


def why_not_captured(model: PreTrainedModel) -> str | None:
    """What keeps the sums of a split model out of CUDA graphs, in words; None where nothing does."""
    backends = dist.get_backend_config(group_of(model)).split(",")  # "cpu:gloo,cuda:nccl"
    backend = dict(part.split(":") for part in backends).get(model.device.type)
    if backend in CAPTURABLE:
        return None
    return f"the target is split over processes, and sums by {backend} cannot be captured"


def group_of(model: PreTrainedModel) -> ProcessGroup:
    shard = next(weight for weight in model.parameters() if isinstance(weight, DTensor))
    return shard.device_mesh.get_group()


class ShardBody(DescribedBody):
    """One process of several that run the same pass. Embedding and head are split, too, and bring their parts together
    in their own forward."""

    whole: PreTrainedModel

    def _embedded(self, new: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = new if new.is_floating_point() else self.whole.get_input_embeddings()(new)
        return super()._embedded(x, positions)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.whole.get_output_embeddings()(hidden)
        return self._scaled(logits)

    def head_into(self, out: Tensor, hidden: Tensor) -> None:
        """The same, left in `out` [M, V]."""
        out.copy_(self.head(hidden))
