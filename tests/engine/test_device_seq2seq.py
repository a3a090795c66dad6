"""Recorded rounds of encoder-decoder models say what rounds step by step say, token for token.

On a CPU nothing is recorded and the same work is called; on a GPU it is replayed from graphs.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from forerun.cache.paged import PagedCache
from forerun.config import Kernels, SamplingParams
from forerun.drafters import DraftModel, EarlyExit, PromptLookup
from forerun.engine import Engine, Request
from forerun.engine.device.choose import runner_of
from forerun.errors import ForerunWarning
from forerun.math.scaled import FP8, INT8, Scheme
from forerun.models.cross_attention import SourceTable
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Rule
from support.seq2seq import rows_of, source_of
from support.tiny import draft_of, tiny_model

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
Texts = dict[int, tuple[int, ...]]


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: MonkeyPatch) -> None:
    """Without them nothing that draws can be recorded on a GPU."""
    if ON_GPU:
        monkeypatch.setenv("FORERUN_KERNELS", "auto")


def texts(
    family: str,
    drafter: str,
    on_device: bool,
    params: SamplingParams,
    rule: Rule = Rule.TOKEN,
    cache: PagedCache | None = None,
) -> Texts:
    """Seven rows that begin and end at different times; two read the same source. In float64 where keys are rounded:
    who decodes beside a row then makes no difference to what is stored."""
    model, draft = tiny_model(family), draft_of(tiny_model(family))
    if ON_GPU:
        model, draft = copy.deepcopy(model).cuda(), draft.cuda()
    if cache is not None and cache.scheme is not None:
        model, draft = copy.deepcopy(model).double(), draft.double()
    target = Seq2SeqScorer(model, cache=cache, use=Kernels.AUTO if ON_GPU else Kernels.OFF)
    guesser: Any = {
        "shared": lambda: DraftModel(draft, shares_encoder=True),
        "own": lambda: DraftModel(draft),
        "exit": lambda: EarlyExit(1),
        "none": lambda: None,
        "lookup": lambda: PromptLookup(max_ngram=1),
    }[drafter]()
    engine = Engine(target, guesser, Constant(3), rule=rule, compile=False)
    if on_device:
        engine.pair.runner = runner_of(target, engine.drafter, rule, engine.clock)
    sources = [source_of(row) for row in rows_of(family)]
    found: Texts = {}
    for step in range(80):
        if step in (0, 4):
            for i in range(4) if step == 0 else range(4, 7):
                source, begin = sources[1 if i == 2 else i], ((2,), (2, 9), (2, 30, 31))[i % 3]
                engine.add(
                    Request(
                        prompt=begin, source=source, max_new_tokens=9 + 4 * (i % 3), params=params, seed=5, request_id=i
                    )
                )
        engine.step()
        found |= {result.request.request_id: result.tokens for result in engine.take_results()}
    assert engine.is_idle and len(found) == 7
    if on_device:
        assert engine.runner is not None and not engine.runner.is_disabled
        assert drafter == "lookup" or engine.runner._rounds, "nothing was sent off"
    return found


@pytest.mark.quick("none-whisper")
@pytest.mark.parametrize("family", ("whisper", "bart", "t5_gated", "moonshine"))
@pytest.mark.parametrize("drafter", ("shared", "own", "none", "lookup"))
def test_recorded_rounds_say_the_same(family: str, drafter: str) -> None:
    params = SamplingParams(temperature=1.0) if drafter in ("shared", "lookup") else SamplingParams()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        assert texts(family, drafter, True, params) == texts(family, drafter, False, params)


@pytest.mark.skipif(ON_GPU, reason="the same as above on a GPU")
@pytest.mark.quick("shared-t5_gated")
@pytest.mark.parametrize("family", ("whisper", "bart", "t5_gated", "moonshine"))
@pytest.mark.parametrize("drafter", ("shared", "none"))
def test_recorded_rounds_over_blocks_say_the_same(family: str, drafter: str) -> None:
    params = SamplingParams(temperature=1.0)
    assert texts(family, drafter, True, params, cache=in_blocks()) == texts(family, drafter, False, params)


@pytest.mark.skipif(ON_GPU, reason="tests/exactness/test_rounded_sources.py has the law on a GPU")
@pytest.mark.quick("exit-whisper-int8")
@pytest.mark.parametrize("scheme", (INT8, FP8), ids=("int8", "fp8"))
@pytest.mark.parametrize("family", ("whisper", "bart", "t5_gated", "moonshine"))
@pytest.mark.parametrize("drafter", ("shared", "exit"))
def test_recorded_rounds_over_rounded_keys_say_the_same(family: str, drafter: str, scheme: Scheme) -> None:
    params = SamplingParams(temperature=1.0)
    by_host = texts(family, drafter, False, params, cache=in_blocks(scheme))
    assert texts(family, drafter, True, params, cache=in_blocks(scheme)) == by_host


def in_blocks(scheme: Scheme | None = None) -> PagedCache:
    return PagedCache(512, torch.device("cpu"), block_size=8, scheme=scheme)


def test_control_a_directory_that_names_the_neighbours_source(monkeypatch: MonkeyPatch) -> None:
    right = SourceTable.write

    def turned(self: SourceTable, *given: Any) -> None:
        self._written = []
        right(self, *given)
        self.table.copy_(self.table.roll(1, dims=1))

    wanted = texts("whisper", "none", False, SamplingParams())
    monkeypatch.setattr(SourceTable, "write", turned)
    assert texts("whisper", "none", True, SamplingParams()) != wanted
