"""One process, or several under `accelerate launch`: who writes, who takes which batch, and what is averaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError

Item = TypeVar("Item")


class Processes:
    """Gradients and metrics of several processes are averaged by Accelerate; alone, everything is the identity."""

    def __init__(self) -> None:
        self._accelerator = _accelerator() if torch.distributed.is_torchelastic_launched() else None

    @property
    def num(self) -> int:
        return self._accelerator.num_processes if self._accelerator else 1

    @property
    def is_main(self) -> bool:
        return self._accelerator is None or bool(self._accelerator.is_main_process)

    @property
    def device(self) -> torch.device | None:
        """Where this process should run, if that was decided for it."""
        return self._accelerator.device if self._accelerator else None

    def wrap(self, module: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return self._accelerator.prepare(module, optimizer) if self._accelerator else (module, optimizer)

    def backward(self, loss: Tensor) -> None:
        if self._accelerator:
            self._accelerator.backward(loss)
        else:
            loss.backward()

    def share(self, items: Iterator[Item]) -> Iterator[Item]:
        """Every n-th item, beginning with this process's own."""
        rank = self._accelerator.process_index if self._accelerator else 0
        return islice(items, rank, None, self.num)

    def mean(self, value: Tensor) -> Tensor:
        reduced: Tensor = self._accelerator.reduce(value, "mean") if self._accelerator else value
        return reduced

    def agreed(self, seconds: float) -> float:
        """One clock for all: were each to look at its own, some would stop and the others wait for them."""
        if self._accelerator is None:
            return seconds
        mine = torch.tensor(seconds, device=self._accelerator.device, dtype=torch.float64)
        return float(self._accelerator.reduce(mine, "mean"))

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()


def _accelerator() -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise ForerunError(
            "training in several processes needs accelerate; run: pip install 'forerun[train]', or start one process"
        ) from error
    return Accelerator(cpu=not torch.cuda.is_available())  # else it takes several CPU processes for lone ones
