"""Fused layers of a GPU over one process's part of a model: two sums a layer over all processes, and nothing else.

A group of one process is enough to see where sums are asked for, and on a GPU that NCCL takes them, in a recorded pass,
too. That the sums are the right ones is seen with two processes (`test_ranks.py`, and below through the interpreter).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("triton")

from forerun import kernels
from forerun.config import Kernels
from forerun.models.bodies.gpu import GpuBody
from forerun.models.bodies.shard_gpu import ShardGpuBody
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass
from support.described import NEW, TEXTS, described_model, expected, feed
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone
from support.ranks import VOCAB, Case, load_shard, run_ranks
from support.recompute import check
from support.tiny import tiny_model

pytestmark = kernel_tests()
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3], [4, 4, 1, 2, 11, 12, 13, 14]]


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def scorer_over(group: ProcessGroup) -> tuple[Scorer, list[Tensor]]:
    """By the references on a CPU; what its modules say of `NEW`."""
    model = described_model("llama").to(DEVICE)
    want, scorer = expected(copy.deepcopy(model)), Scorer(model, use=Kernels.OFF)
    scorer.body = GpuBody(model, group)
    feed(scorer)
    return scorer, want


def test_two_sums_a_layer_and_nothing_else(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, want = scorer_over(group)
    sums: list[Any] = []
    real = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda made, group: sums.append((made.shape, real(made, group=group))))
    for own, right in zip(scorer.score([0, 1], NEW).split([len(new) for new in NEW]), want, strict=True):
        check(own, right)
    layers = scorer.model.config.num_hidden_layers
    assert len(sums) == 2 * layers
    scorer.rewind([0], [len(TEXTS[0])])
    check(torch.cat([scorer.score([0], [[token]]) for token in NEW[0]]), want[0])  # one row: no residual on the way
    assert len(sums) == 2 * layers * (1 + len(NEW[0]))


@on_gpu_alone
def test_nccl_in_a_recorded_pass(group: ProcessGroup) -> None:
    scorer, want = scorer_over(group)
    scorer.cache.reserve([0, 1], [16, 16])
    a_pass, past = StaticPass(scorer), torch.tensor([len(text) for text in TEXTS], device=DEVICE)
    rows = a_pass.rows(torch.tensor([scorer.cache.slot(row) for row in (0, 1)], device=DEVICE), past, 3, 16)
    tokens = torch.tensor([NEW[0], [*NEW[1], 5, 5]], device=DEVICE)
    with torch.inference_mode():
        a_pass.logits(tokens, rows)  # compiles, and lets NCCL begin
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = a_pass.logits(tokens, rows)
        graph.replay()
    check(got[:3], want[0])
    check(got[3:4], want[1])


def decode_through_kernels(folder: str, case: Case) -> tuple[Any, bool]:
    """On a rank: new tokens by fused layers, and whether its weights are still there once."""
    kernel_tests()
    kernels.TRITON_DEVICES.add(DEVICE.type)
    target = load_shard(folder)
    tokens, decoder = case.decode(target), case.decoder(target)
    body = decoder.engine.target.body
    assert isinstance(body, ShardGpuBody)
    places = [{w.untyped_storage().data_ptr() for w in weights} for weights in (
        body.model.parameters(), (w.to_local() if hasattr(w, "to_local") else w for w in target.base_model.parameters())
    )]  # fmt: skip
    return tokens, places[0] == places[1]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="ranks that share a GPU are test_ranks.py's")
def test_two_ranks_through_the_interpreter(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    model.save_pretrained(tmp_path)
    calls = ((PROMPTS, {"max_new_tokens": 5}), (PROMPTS[:1], {"max_new_tokens": 4, "temperature": 0.9, "seed": 3}))
    settings = {"policy": 2, "kernels": "on"}
    want = Case("lookup", settings | {"kernels": "off"}, calls).decode(model)
    got = run_ranks(2, decode_through_kernels, str(tmp_path), Case("lookup", settings, calls))
    assert got == [(want, True)] * 2
