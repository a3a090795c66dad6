"""Fused layers of a CPU over one process's part of a model: two sums a layer over all processes, and nothing else.

A group of one process is enough to see where sums are asked for. That they are the right ones is seen with two
processes (`test_ranks.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.models.bodies import shard_cpu
from forerun.models.bodies.shard_cpu import ShardCpuBody
from forerun.models.scorer import Scorer
from support.described import NEW, TEXTS, described_model, expected, feed
from support.recompute import check


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """What is asked of process groups meanwhile, whoever asks: names, and sizes of the first tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.asked.append((func._opname, tuple(args[0][0].shape)))
        return func(*args, **(kwargs or {}))


def test_two_sums_a_layer_and_nothing_else(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = described_model("llama")
    want, scorer = expected(copy.deepcopy(model)), Scorer(model, use=Kernels.OFF)
    monkeypatch.setattr(shard_cpu, "group_of", lambda whole: group)
    scorer.body = ShardCpuBody(model, model.base_model, 1, Kernels.ON)
    feed(scorer)
    with Collectives() as both:
        got = scorer.score([0, 1], NEW)
    for own, right in zip(got.split([len(new) for new in NEW]), want, strict=True):
        check(own, right)
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    assert both.asked == 2 * layers * [("allreduce_", (4, hidden))]
    scorer.rewind([0], [len(TEXTS[0])])
    with Collectives() as single:
        got = torch.cat([scorer.score([0], [[token]]) for token in NEW[0]])
    check(got, want[0])
    assert single.asked == 2 * layers * len(NEW[0]) * [("allreduce_", (1, hidden))]
