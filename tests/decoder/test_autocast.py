"""`torch.autocast` around a call: refused, unless it asks for the dtype that the target has."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from forerun import Engine, Request, SpeculativeDecoder
from forerun.errors import InvalidArgument
from forerun.models.scorer import Scorer
from forerun.policy import as_policy
from support.tiny import plain_greedy, tiny_model

PROMPT = [5, 9, 3, 60, 2, 7, 11]


def _autocast(**settings: Any) -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16, **settings)


def _said(decoder: SpeculativeDecoder) -> list[int]:
    return decoder.generate([PROMPT], max_new_tokens=8).new_tokens[0]


@pytest.mark.parametrize("kernels", ("on", "off"))
def test_a_call_within_it_is_refused_and_leaves_nothing_behind(kernels: str) -> None:
    if kernels == "on":
        pytest.importorskip("numba")
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, "lookup", kernels=kernels, keep_rows=2)
    with _autocast():
        with pytest.raises(InvalidArgument, match=r"autocast to torch\.bfloat16 is on.*torch\.float32.*enabled=False"):
            _said(decoder)
        with _autocast(enabled=False):
            assert _said(decoder) == plain_greedy(model, PROMPT, 8)
    assert _said(decoder) == plain_greedy(model, PROMPT, 8)


def test_decoders_are_not_made_in_it_nor_steps_made() -> None:
    model = tiny_model("llama")
    engine = Engine(Scorer(model), None, as_policy(1))
    engine.add(Request(prompt=tuple(PROMPT), max_new_tokens=8))
    with _autocast():
        with pytest.raises(InvalidArgument, match="autocast"):
            SpeculativeDecoder(model)
        with pytest.raises(InvalidArgument, match="autocast"):
            engine.step()
    while not engine.is_idle:
        engine.step()
    assert list(engine.take_results()[0].tokens) == plain_greedy(model, PROMPT, 8)


def test_the_dtype_that_a_target_has_is_no_other() -> None:
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    decoder = SpeculativeDecoder(model, None)
    wanted = _said(decoder)
    with _autocast():
        assert _said(decoder) == wanted
