"""A process's own part of a split model, run by the fused layers of the CPU: sums meet twice a layer, and nowhere else.

A part is a model of the same family with fewer heads and a narrower MLP, over this process's weights where they lie. It
is described as any model is; only what attention and the MLP would add to the hidden states has to be summed up first.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from forerun.config import Kernels
from forerun.kernels.cpu import stack
from forerun.kernels.cpu.memory import Ints
from forerun.models.bodies import cpu, readers
from forerun.models.bodies.cpu import CpuBody


def local_part(model: PreTrainedModel) -> PreTrainedModel | None:
    """The headless model that this process holds; None where it is not a smaller one of a family that is proven."""
    shard = next(weight for weight in model.parameters() if isinstance(weight, DTensor))
    config = deepcopy(model.config)
    if config.model_type not in readers.PROVEN:  # others norm, add or multiply what has to be summed up first
        return None
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count, rest = divmod(getattr(config, name), shard.device_mesh.size())
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
    found: PreTrainedModel = part.eval()
    return found if cpu.why_not(found) is None else None


def _local(weight: Tensor) -> Tensor:
    own: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return own.detach()


class ShardCpuBody(CpuBody):
    """One process of several that run the same pass."""

    def __init__(self, whole: PreTrainedModel, part: PreTrainedModel, num_threads: int, use: Kernels) -> None:
        super().__init__(part, num_threads, use)
        self.whole = whole
        shard = next(weight for weight in whole.parameters() if isinstance(weight, DTensor))
        self._group = shard.device_mesh.get_group()

    def _embedded(self, new: Tensor, positions: Tensor) -> Tensor:
        """By the split embedding's own forward: a token's is in one process."""
        x: Tensor = new if new.is_floating_point() else self.whole.get_input_embeddings()(new)
        return super()._embedded(x, positions)

    def head(self, hidden: Tensor) -> Tensor:
        """By the split head's own forward, which brings the logits of all processes together."""
        logits: Tensor = self.whole.get_output_embeddings()(hidden)
        return self._scaled(logits)

    def _run(self, x: Tensor, positions: Ints, starts: Ints) -> None:
        says, (tokens, hidden) = self.decoder, x.shape
        sizes = (tokens, hidden, says.num_heads, says.num_key_heads, says.head_size, self.num_threads)
        for index, layer in enumerate(says.layers):
            for half in (stack.ATTENTION, stack.MLP):
                self._run_layers(x.numpy(), positions, starts, index, index + 1, half)
                delta = torch.from_numpy(stack.delta_of(self._scratch, *sizes))
                dist.all_reduce(delta, group=self._group)
                x += layer.multiplier * delta
