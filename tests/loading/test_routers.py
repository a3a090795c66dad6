"""Linear layers that choose experts stay as they are where others are quantised, whatever a family calls them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from forerun.kernels.scaled import ScaledWeight
from forerun.loading import rounding
from forerun.loading.quantise import matrices
from forerun.loading.routers import routers
from support.census import Recipe, build, causal_recipes
from support.pinned import needs_pinned_transformers
from support.tiny import tiny_model

pytestmark = needs_pinned_transformers

RECIPES = {recipe.name: recipe for recipe in causal_recipes()}
MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "afmoe": ({}, {"mlp.router.gate"}),
    "dbrx": ({}, {"ffn.router.layer"}),
    "gemma4_text": (MOE, {"router.proj"}),
    "hunyuan_v1_moe": ({}, {"mlp.gate.wg"}),
    "jetmoe": ({}, {"mlp.router.layer", "self_attention.experts.router.layer"}),
    "longcat_flash": ({}, {"mlp.router.classifier"}),
}


def _model(family: str) -> Any:
    known = RECIPES[family]
    return build(Recipe(family, known.class_name, {**known.overrides, **FAMILIES[family][0]})).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_router_is_found(family: str) -> None:
    model = _model(family)
    found = routers(model)
    names = {name.split(".", 3)[-1] for name, module in model.named_modules() if module in found}
    assert names == FAMILIES[family][1]
    left = {id(module.weight) for module in found}
    assert left.isdisjoint(map(id, matrices(model))) and matrices(model)
    rounding.round_weights(model, "int8", torch.device("cpu"), "tiny")
    assert all(type(module.weight) is nn.Parameter for module in found)
    assert any(isinstance(weight, ScaledWeight) for weight in model.parameters())


def test_a_linear_layer_beside_its_experts() -> None:
    """As older versions of transformers, and code that comes with a model, have it."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    model.config = LlamaConfig(num_local_experts=6)
    block = model.model.layers[0].mlp
    block.gate, block.beside = nn.Linear(32, 6), nn.Linear(32, 1)
    assert not routers(model), "no experts, no router"
    block.experts = nn.ModuleList([nn.Linear(32, 6)])
    assert routers(model) == {block.gate}


def test_gates_that_choose_nothing() -> None:
    model = build(RECIPES["kimi_linear"])
    gates = [module for module in model.modules() if type(module).__name__.endswith("ForgetGate")]
    assert gates and not any(child in routers(model) for gate in gates for child in gate.modules())
