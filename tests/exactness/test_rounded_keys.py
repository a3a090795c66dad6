"""Drafts before a target whose cache is rounded: the text follows the model that reads rounded keys."""

from __future__ import annotations

import copy

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from transformers import PreTrainedModel

from exactness import controls
from exactness.rounded import COARSE, RoundedCache
from exactness.sampling import PLAIN, Clock, verdict
from forerun import SpeculativeDecoder
from forerun.cache.paged import PagedCache
from forerun.drafters import DraftModel
from forerun.engine import Engine, Request
from forerun.math.scaled import FP8, INT8, Scheme
from forerun.models import cache_size
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.devices import GPU
from support.finish import finished
from support.markov import toy_pair

PROMPT, STEPS, VOCAB = (1, 2, 0, 1, 2), 3, 3
NUMBER = 768


@torch.no_grad()
def law_of(model: PreTrainedModel, scheme: Scheme | None) -> Tensor:
    """Probability of every continuation, from whole texts read into a new cache each."""
    exact = copy.deepcopy(model).double()
    texts, mass = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(STEPS):
        law = exact(texts, past_key_values=RoundedCache(scheme), use_cache=True).logits[:, -1].softmax(-1)
        mass = (mass[:, None] * law).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))
        texts = torch.cat([texts.repeat_interleave(VOCAB, dim=0), following[:, None]], dim=1)
    return mass.view([VOCAB] * STEPS)


def sampled(scheme: Scheme) -> list[tuple[int, ...]]:
    """Step by step on the CPU, rows in blocks, read by torch."""
    target, draft = toy_pair(VOCAB)
    scorer = Scorer(copy.deepcopy(target), cache=PagedCache(16384, torch.device("cpu"), scheme=scheme))
    engine = Engine(scorer, DraftModel(copy.deepcopy(draft)), Constant(3), rule=Rule.TOKEN, clock=Clock())
    for i in range(NUMBER):
        engine.add(Request(prompt=PROMPT, max_new_tokens=STEPS + 1, params=PLAIN, request_id=i))
    return [result.tokens for result in finished(engine)]


def test_joint_law_and_its_control() -> None:
    """The law of rounded keys, and not that of the model as it is."""
    target, found = toy_pair(VOCAB)[0], sampled(COARSE)
    assert len(found) == NUMBER
    assert verdict(found, law_of(target, COARSE)) == ""
    assert verdict(found, law_of(target, None)), "rounding cannot be told from not rounding"


@pytest.mark.slow
def test_control_wrong_correction_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert verdict(sampled(INT8), law_of(toy_pair(VOCAB)[0], INT8))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("scheme", [INT8, FP8, COARSE], ids=["int8", "fp8", "coarse"])
@pytest.mark.parametrize("kernels", ["on", "auto"])
def test_joint_law_on_a_gpu(scheme: Scheme, kernels: str, device: str, monkeypatch: MonkeyPatch) -> None:
    """Fused layers in recorded rounds, against the law from transformers' own cache on the CPU."""
    monkeypatch.setitem(cache_size.CACHE_SCHEMES, scheme.name, scheme)
    target, draft = (copy.deepcopy(model).to(device) for model in toy_pair(VOCAB))
    decoder = SpeculativeDecoder(target, DraftModel(draft), policy=3, cache_dtype=scheme.name, kernels=kernels)
    found: list[list[int]] = []
    for seed in range(3):
        ids = [list(PROMPT)]  # in a tensor without a mask the pad id, 0, would be padding
        out = decoder.generate(ids, max_new_tokens=STEPS + 1, temperature=1.0, seed=seed, num_return_sequences=256)
        found += out.new_tokens
    assert verdict(found, law_of(toy_pair(VOCAB)[0], scheme)) == ""
    if scheme is COARSE:
        assert verdict(found, law_of(toy_pair(VOCAB)[0], None)), "keys were not rounded"
