"""Same keys, same tokens on a GPU: whoever judges, in tiles of whatever size, however often."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

import forerun
from support.devices import on_gpu
from support.tiny import draft_of, ragged_prompts, tiny_model

pytestmark = on_gpu

VOCAB = 5000  # several tiles of every kernel
PROMPTS = ragged_prompts(5, VOCAB, seed=2)


@lru_cache
def pair() -> tuple[Any, Any]:
    model = tiny_model("llama", vocab=VOCAB)
    return copy.deepcopy(model).to("cuda"), draft_of(model).to("cuda")


def texts(rule: str = "token", seed: int = 3, kernels: str = "off", **asked: Any) -> list[list[int]]:
    """With `kernels` off the logits are torch's own, and the same whoever judges them."""
    target, draft = pair()
    decoder = forerun.SpeculativeDecoder(target, forerun.DraftModel(draft), policy=4, rule=rule, kernels=kernels)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS], device="cuda")
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS], device="cuda")
    asked = {"temperature": 0.9, "max_new_tokens": 24, **asked}
    return decoder.generate(ids, mask, seed=seed, **asked).new_tokens


WAYS = [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.02, "repetition_penalty": 1.2}, {"temperature": 0.0}]


@pytest.mark.parametrize("asked", WAYS, ids=str)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_kernels_and_references(rule: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for use in ("off", "auto"):
        monkeypatch.setenv("FORERUN_KERNELS", use)
        made.append(texts(rule, **asked))
    assert made[0] == made[1]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_tiles(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other blocks, sums by few programs or many, the draw in a launch of its own, no launch before another's end."""
    kernel = importlib.import_module("forerun.kernels.verify.verify")
    right, tuning = kernel.verify_packed, kernel.TUNING
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    usual = texts(rule, top_p=0.95)
    other = replace(tuning, warps=1, sum_programs=1, tiles=2, last_draws=False, overlap=False)
    monkeypatch.setattr(kernel, "verify_packed", lambda *a, **_: right(*a[:5], tuning=other))
    assert texts(rule, top_p=0.95) == usual


def test_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    assert len({str(texts(kernels="auto", top_k=50)) for _ in range(6)}) == 1


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    assert texts(seed=3) != texts(seed=4)
