"""Collectives by way of the CPU, for ranks that share one GPU: NCCL wants a GPU for each, and gloo's own for tensors on
a GPU ended such processes by a segmentation fault. For correctness only: every sum waits for the device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.futures import Future

NAME = "staged"


class StagedGroup(dist.ProcessGroup):
    """What a pass of a split model uses; anything else raises."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size, self._gloo = size, ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            staged = tensor.cpu()
            self._gloo.allreduce([staged], opts or dist.AllreduceOptions()).wait()
            tensor.copy_(staged)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            staged = tensor.cpu()
            self._gloo.broadcast([staged], opts).wait()
            tensor.copy_(staged)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            staged = [part.cpu() for part in parts]
            self._gloo.allgather([staged], [tensor.cpu()]).wait()
            for part, whole in zip(parts, staged, strict=True):
                part.copy_(whole)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        self.allgather([list(output.chunk(self._size))], [tensor])
        return _done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced  # torch 2.11

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def register() -> None:
    """Let `init_process_group` know it."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
