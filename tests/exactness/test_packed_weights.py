"""Drafts before a target whose weights are packed on a CPU: the text follows the law of what is stored and computed."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from pytest import MonkeyPatch
from torch import Tensor, nn
from transformers import PreTrainedModel

pytest.importorskip("numba")

from exactness import controls
from exactness.sampling import verdict
from forerun import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading.quantise import INTEGER_GROUPS, INTEGERS, SCHEMES, quantise
from forerun.math import integer, panels
from forerun.types import Rule
from support.markov import SOFTEN, joint_law
from support.stored import sizes_for, store, widened
from support.tiny import draft_of, tiny_model

COPIES, PROMPT, VOCAB = 256, (1, 2, 0, 1, 2), 3
FORMATS = {"int8": "Q8_0", "w8a8": "I8", "w8a8-g32": "I8_32", "int4": "Q4_1", "BF16": "BF16", "Q4_K": "Q4_K"}
FAR = 60.0  # how far one number of every token stands out where tokens are rounded, as in published models


def wide(name: str) -> PreTrainedModel:
    """Before anything is rounded: a model whose matrices are whole blocks of a format."""
    model = copy.deepcopy(tiny_model("llama", 0, vocab=VOCAB, **sizes_for(name)))
    model.get_output_embeddings().weight.data.mul_(SOFTEN)
    return model


@cache
def target(kind: str) -> PreTrainedModel:
    """Rounded by a scheme, or stored in a format."""
    model = wide("Q8_0" if kind in SCHEMES else kind)
    if kind not in SCHEMES:
        store(model, kind)
    else:
        if kind in (INTEGERS, INTEGER_GROUPS):
            _let_one_stand_out(model)
        quantise(model, kind, "toy")
    stored = {weight.format.name for weight in model.model.layers.parameters() if isinstance(weight, NarrowWeight)}
    assert stored == {FORMATS[kind]}
    return model


def _let_one_stand_out(model: PreTrainedModel) -> None:
    """The same model but for rounding: what a norm makes larger, the products behind it make smaller."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, products in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[0] *= FAR
            for product in products:
                product.weight.data[:, 0] /= FAR


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same numbers in plain modules; what integers are multiplied with is rounded before each layer."""
    plain = widened(model)
    for module, packed in zip(plain.modules(), model.modules(), strict=True):
        weight = packed._parameters.get("weight")
        if isinstance(packed, nn.Linear) and isinstance(weight, NarrowWeight) and weight.multiplies_integers:
            group = panels.GROUP if weight.format.name == panels.NAME else weight.shape[1]
            module.register_forward_pre_hook(lambda _, given, group=group: (_rounded(given[0], group),))
    return plain


def _rounded(x: Tensor, group: int) -> Tensor:
    steps, scale = integer.rounded(x.float().unflatten(-1, (-1, group)))
    return (steps.double() * scale.double()).flatten(-2).to(x.dtype)


def samples(kind: str, rule: Rule = Rule.TOKEN, number: int = 3) -> list[list[int]]:
    """New tokens of so many times `COPIES` rows, through the compiled layers."""
    model = copy.deepcopy(target(kind))
    decoder = SpeculativeDecoder(model, DraftModel(draft_of(widened(model), 0.1)), policy=3, rule=rule, kernels="on")
    assert decoder.engine.target.is_fused
    found: list[list[int]] = []
    for seed in range(number):
        out = decoder.generate(
            [list(PROMPT)], max_new_tokens=4, temperature=1.0, seed=seed, num_return_sequences=COPIES
        )
        found += out.new_tokens
    assert 0 < out.stats.num_accepted_tokens < out.stats.num_draft_tokens
    return found


@cache
def law(kind: str, is_rounded: bool = True) -> Tensor:
    """Of what a target computes; or of its weights alone, whatever they are multiplied with."""
    return joint_law(twin(target(kind)) if is_rounded else widened(target(kind)), PROMPT, 3)


@pytest.mark.quick("w8a8-token")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", FORMATS)
def test_joint_law(kind: str, rule: str) -> None:
    """Where tokens are rounded, the law of the weights alone is another one, and the same samples tell."""
    found = samples(kind, Rule(rule))
    assert verdict(found, law(kind)) == ""
    if kind in (INTEGERS, INTEGER_GROUPS):
        assert verdict(found, law(kind, is_rounded=False))


@pytest.mark.slow
def test_control_the_law_of_the_weights_before_they_were_rounded() -> None:
    """Four bits change the model."""
    assert verdict(samples("int4"), joint_law(wide("Q8_0"), PROMPT, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_control_wrong_correction_is_noticed(kind: str, monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert verdict(samples(kind), law(kind))
