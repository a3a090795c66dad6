"""torch.set_default_dtype is the user's: memory that compiled code writes float32 to is float32 all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.models.bodies import choose
from forerun.models.bodies.cpu_library import LibraryBody
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source
from support.described import described_model
from support.stored import SIZE, stored_rows
from support.tiny import tiny_model
from support.whisper import STEPS, tiny_whisper

OTHERS = [torch.float64, torch.bfloat16]  # numbers that take more room than float32, and less


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def scores(model: PreTrainedModel, long: bool = False) -> Tensor:
    scorer = Scorer(model, use=Kernels.ON)
    assert scorer.is_fused
    if long:
        scorer.body.longest_pass, scorer.body.beyond = 0, LibraryBody(model, 2, Kernels.ON)
    for row in (0, 1):
        scorer.admit(row)
    scorer.feed([0, 1], [[5, 6, 7], [8]])
    return torch.cat([scorer.score([0, 1], [[1, 2], [3, 4, 5, 6, 9]]), scorer.score([1], [[2]])])


def seq2seq_scores(model: PreTrainedModel) -> Tensor:
    scorer = Seq2SeqScorer(model, use=Kernels.ON)
    generator = torch.Generator().manual_seed(0)
    scorer.admit(0)
    scorer.read(0, Source(states=torch.randn(STEPS, model.config.d_model, generator=generator, dtype=torch.float32)))
    scorer.feed([0], [[1, 2]])
    return scorer.score([0], [[3, 4, 5]])


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_fused_layers(family: str, dtype: torch.dtype) -> None:
    model = described_model(family)
    want = scores(model)
    with default(dtype):
        assert torch.equal(scores(model), want)


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_librarys_products(dtype: torch.dtype) -> None:
    model = described_model("llama")
    want = scores(model, long=True)
    with default(dtype):
        assert torch.equal(scores(model, long=True), want)


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("family", ["bart", pytest.param("whisper", marks=pytest.mark.slow)])  # compiled: 20 s
def test_cross_attention(family: str, dtype: torch.dtype) -> None:
    model = tiny_whisper() if family == "whisper" else tiny_model(family)
    want = seq2seq_scores(model)
    with default(dtype):
        assert torch.equal(seq2seq_scores(model), want)


@pytest.mark.parametrize("dtype", OTHERS)
def test_narrow_weights(dtype: torch.dtype) -> None:
    weight, x = NarrowWeight(*stored_rows("Q8_0", 37)), torch.randn(5, SIZE, dtype=torch.float32)
    want, dense = F.linear(x, weight), weight.dense()
    with default(dtype):
        assert torch.equal(F.linear(x, weight), want) and torch.equal(weight.dense(), dense)


@pytest.mark.parametrize("dtype", OTHERS)
def test_timings(dtype: torch.dtype) -> None:
    model = described_model("llama")
    with default(dtype):
        times = choose._measure(model, 1)
    assert times.keys() == {"1", "modules"} and all(seconds > 0 for seconds in times.values())
