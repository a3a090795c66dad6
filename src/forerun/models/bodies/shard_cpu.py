"""A process's own part of a split model, run by the fused layers of the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from forerun.config import Kernels
from forerun.kernels.cpu import stack
from forerun.kernels.cpu.memory import Ints
from forerun.models.bodies.cpu import CpuBody
from forerun.models.bodies.shard import ShardBody, group_of


class ShardCpuBody(ShardBody, CpuBody):
    def __init__(self, whole: PreTrainedModel, part: PreTrainedModel, num_threads: int, use: Kernels) -> None:
        self.whole, self._group = whole, group_of(whole)
        super().__init__(part, num_threads, use)

    def _run(self, x: Tensor, positions: Ints, starts: Ints) -> None:
        spec, (tokens, hidden) = self.decoder, x.shape
        sizes = (tokens, hidden, spec.num_heads, spec.num_key_heads, spec.head_size, self.num_threads)
        for index, layer in enumerate(spec.layers):
            for half in (stack.ATTENTION, stack.MLP):
                self._run_layers(x.numpy(), positions, starts, index, index + 1, half)
                delta = torch.from_numpy(stack.delta_of(self._scratch, *sizes))
                dist.all_reduce(delta, group=self._group)
                x += layer.multiplier * delta
