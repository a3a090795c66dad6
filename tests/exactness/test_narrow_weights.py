"""Drafts before a target with rounded weights: the text follows the rounded target's law, not the wide one's."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from transformers import PreTrainedModel

from exactness import controls
from exactness.sampling import verdict
from forerun import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.rounding import round_weights
from forerun.math import scaled
from forerun.math.scaled import SCHEMES
from forerun.types import Rule
from support.devices import GPU
from support.markov import SOFTEN, joint_law
from support.tiny import draft_of, tiny_model

COPIES, PROMPT, VOCAB = 256, (1, 2, 0, 1, 2), 3


@cache
def pair(scheme: str, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target that is rounded where it is to run, as a loaded one is, and a draft of the wide one."""
    target = copy.deepcopy(tiny_model("llama", 0, vocab=VOCAB, intermediate_size=64))
    target.get_output_embeddings().weight.data.mul_(SOFTEN)
    draft = draft_of(target, 0.1, 1).to(device)
    round_weights(target.to(device), scheme, torch.device(device), "toy")
    return target, draft


def wide(model: PreTrainedModel) -> PreTrainedModel:
    """The same numbers in plain modules, written out: rows are rounded before each layer where the scheme says so."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        weight = module._parameters.get("weight")
        if not isinstance(weight, ScaledWeight):
            continue
        exact = scaled.dense(weight.raw, weight.scales, weight.scheme)
        module._parameters["weight"] = torch.nn.Parameter(exact, requires_grad=False)
        if weight.scheme.rounds_rows:
            module.register_forward_pre_hook(lambda _, rows, scheme=weight.scheme: (_rounded(rows[0], scheme),))
    return twin


def _rounded(x: Tensor, scheme: scaled.Scheme) -> Tensor:
    values, scales = scaled.rounded_rows(x.flatten(0, -2), scheme)
    return (values.double() * scales.double().unsqueeze(1)).view(x.shape).to(x.dtype)


def misfit_of(scheme: str, rule: Rule, device: str = "cpu", law_of: str | None = None, **options: Any) -> str:
    target, draft = map(copy.deepcopy, pair(scheme, device))
    decoder = SpeculativeDecoder(target, DraftModel(draft), policy=3, rule=rule, **options)
    ids = [list(PROMPT)]  # in a tensor without a mask the pad id, 0, would be padding
    samples: list[list[int]] = []
    for seed in range(3):
        out = decoder.generate(ids, max_new_tokens=4, temperature=1.0, seed=seed, num_return_sequences=COPIES)
        samples += out.new_tokens
    return verdict(samples, joint_law(wide(pair(law_of or scheme)[0]), PROMPT, 3))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick("int4")
def test_joint_law(scheme: str) -> None:
    """Through the modules, whose products are the references here."""
    assert misfit_of(scheme, Rule.TOKEN, kernels="off") == ""


@pytest.mark.slow
def test_control_wrong_correction_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert misfit_of("int8", Rule.TOKEN, kernels="off")


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_joint_law_on_a_gpu(scheme: str, rule: str, device: str) -> None:
    """Fused layers in recorded rounds, against the law of the same numbers on the CPU."""
    assert misfit_of(scheme, Rule(rule), device, kernels="on") == ""


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_control_a_gpu_that_judges_a_little_too_warm(scheme: str, device: str, monkeypatch: MonkeyPatch) -> None:
    controls.warm_kernel(monkeypatch)
    assert misfit_of(scheme, Rule.TOKEN, device, kernels="on")
