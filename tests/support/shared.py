"""Sums of two ranks that share one GPU, by kernels over memory that both have mapped: a CUDA graph can hold them.

NCCL wants a GPU for each rank, and sums by way of the CPU (`staged`) cannot be captured. A kernel here writes its part
to its rank's slot, raises that rank's flag to the number of the sum and waits for the other's. The number is counted on
the device, so that a graph that is run again counts on. Kernels of two processes take turns on a GPU: a sum takes
milliseconds. For correctness only.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from forerun.models.bodies.shard import CAPTURABLE
from support.staged import StagedGroup, _done

NAME = "shared"
CAPACITY = 1 << 18  # numbers of a sum
SPINS = 20_000_000  # looks at the other's flag, some ten seconds: a test fails instead of hanging
_groups: list[SharedGroup] = []


class SharedGroup(StagedGroup):
    """Sums and gathers floating-point numbers on a GPU; the rest goes by way of the CPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        assert size == 2, "each kernel waits for one other"
        self._store, self._own_rank = store, rank
        self._slots: tuple[Tensor, ...] | None = None  # own and the other's numbers, own and the other's flag
        # Sums so far, sums whose other half never came, whether nobody is to wait any more.
        self._counts = torch.zeros(0, dtype=torch.int32)
        _groups.append(self)

    @property
    def num_failed(self) -> int:
        return 0 if self._slots is None else int(self._counts[1])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if not all(_is_here(tensor) for tensor in tensors):
            return super().allreduce(tensors, opts)
        for tensor in tensors:
            self._meet(tensor, tensor, is_sum=True)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if not all(_is_here(tensor) for tensor in inputs):
            return super().allgather(outputs, inputs, opts)
        for parts, tensor in zip(outputs, inputs, strict=True):
            whole = tensor.new_empty(2, *tensor.shape)
            self._meet(tensor.contiguous(), whole, is_sum=False)
            for part, made in zip(parts, whole, strict=True):
                part.copy_(made)
        return _done(outputs)

    def abort(self) -> None:
        """Let no kernel wait any more; beside the stream in which one does."""
        if self._slots is not None:
            with torch.cuda.stream(self._side):
                self._counts[2:].copy_(self._one)

    def _meet(self, tensor: Tensor, out: Tensor, *, is_sum: bool) -> None:
        from support.shared_kernel import meet

        assert tensor.is_contiguous() and tensor.numel() <= CAPACITY
        slots = self._slots or self._map(tensor.device)
        meet[(1,)](
            tensor, out, *slots, self._counts, tensor.numel(), CAPACITY, self._own_rank, is_sum, SPINS, num_warps=8
        )

    def _map(self, device: torch.device) -> tuple[Tensor, ...]:
        """Meet the other rank, and map its slot."""
        numbers = torch.zeros(2 * CAPACITY, device=device)  # two halves: one is written while the other is still read
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(3, dtype=torch.int32, device=device)
        self._one, self._side = torch.ones(1, dtype=torch.int32, device=device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._store.set(f"slot {self._own_rank}", pickle.dumps([reduce_tensor(numbers), reduce_tensor(flag)]))
        told = pickle.loads(self._store.get(f"slot {1 - self._own_rank}"))
        others = [make(*arguments) for make, arguments in told]
        self._slots = numbers, others[0], flag, others[1]
        return self._slots


def _is_here(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_floating_point()


def num_failed() -> int:
    """Sums of this process whose other half never came."""
    return sum(group.num_failed for group in _groups)


def register() -> None:
    """Let `init_process_group` know it, and passes that use it be captured."""
    dist.Backend.register_backend(NAME, SharedGroup, devices=["cpu", "cuda"])
    CAPTURABLE.add(NAME)
