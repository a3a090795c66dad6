"""Trees through the whole loop: the joint law of what is said, with real passes, tree masks and caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from exactness.sampling import verdict
from forerun import SpeculativeDecoder
from forerun.cache.ragged import RaggedCache
from forerun.drafters import Chain, DraftModel, EarlyExit, FeatureHead, ParallelHeads, PromptLookup, Tree
from forerun.drafters.base import Drafter
from forerun.math import siblings
from forerun.models import branches
from support.heads import head_of
from support.markov import joint_law, toy_pair

COPIES = 256
PROMPTS = ((1, 2, 0, 1, 2), (2,), (0, 1, 1))
STEPS = 4  # one more than a round can say: the cache that a kept path leaves is read again
DEPTH = 2


def make_drafter(name: str, way: str) -> Drafter:
    target, draft = (copy.deepcopy(model) for model in toy_pair(3))
    tree = {"nodes": 5, "width": 2, "siblings": way}
    return {
        "model": lambda: Tree(DraftModel(draft), **tree),
        "exit": lambda: Tree(EarlyExit(1), **tree),
        "head": lambda: Tree(FeatureHead(head_of(target, noise=0.1)), **tree),
        "heads": lambda: Tree(ParallelHeads(head_of(target, blocks=3, noise=0.1)), **tree),
        "chain": lambda: Chain(PromptLookup(min_ngram=2), Tree(DraftModel(draft), **tree)),
    }[name]()


def misfits(name: str, way: str, attention: str = "auto") -> list[str]:
    """Three prompts of different lengths, many copies of each, side by side."""
    target = copy.deepcopy(toy_pair(3)[0])
    decoder = SpeculativeDecoder(target, make_drafter(name, way), policy=DEPTH, attention=attention, kernels="off")
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    out = decoder.generate(ids, mask, max_new_tokens=STEPS, temperature=1.0, seed=1, num_return_sequences=COPIES)
    samples = [out.new_tokens[i * COPIES : (i + 1) * COPIES] for i in range(3)]
    assert out.stats.num_draft_tokens > DEPTH * out.stats.num_drafts or name == "chain", "these were no trees"
    laws = [joint_law(toy_pair(3)[0], prompt, STEPS) for prompt in PROMPTS]
    return [verdict(found, law) for found, law in zip(samples, laws, strict=True)]


@pytest.mark.quick("model-sampled-pad")
@pytest.mark.parametrize(
    ("name", "way", "attention"),
    [
        ("model", "sampled", "pad"),
        ("model", "top", "split"),
        ("head", "sampled", "split"),
        ("heads", "sampled", "pad"),
        ("exit", "top", "pad"),
        ("chain", "sampled", "auto"),
    ],
)
def test_joint_law(name: str, way: str, attention: str) -> None:
    assert misfits(name, way, attention) == ["", "", ""]


def test_control_wrong_residual(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "residual", lambda p, q: p)
    assert any(misfits("model", "sampled"))


@pytest.mark.slow
def test_control_branches_see_each_other(monkeypatch: MonkeyPatch) -> None:
    right = branches._of_row

    def blind(past: int, count: int, parents: Sequence[int], span: int) -> tuple[Any, Any]:
        positions, seen = right(past, count, parents, span)
        return positions, np.ones_like(seen)

    monkeypatch.setattr(branches, "_of_row", blind)
    assert any(misfits("model", "top"))


@pytest.mark.slow
def test_control_positions_by_place(monkeypatch: MonkeyPatch) -> None:
    right = branches._of_row

    def by_place(past: int, count: int, parents: Sequence[int], span: int) -> tuple[Any, Any]:
        return np.arange(span), right(past, count, parents, span)[1]

    monkeypatch.setattr(branches, "_of_row", by_place)
    assert any(misfits("model", "top"))


@pytest.mark.slow
def test_control_keys_stay_where_they_were_written(monkeypatch: MonkeyPatch) -> None:
    def keep(self: RaggedCache, row: int, start: int, picks: Sequence[int]) -> None:
        self._length[row] = start + len(picks)

    monkeypatch.setattr(RaggedCache, "keep", keep)
    assert any(misfits("model", "top"))
