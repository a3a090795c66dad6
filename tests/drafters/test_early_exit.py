"""Models whose first layers cannot run alone are refused with that reason, when the drafter meets its target."""

from __future__ import annotations

import pytest

from forerun.drafters import EarlyExit
from forerun.errors import UnsupportedModel
from forerun.models.seq2seq import scorer_of
from support.census import build, causal_recipes

RECIPES = {recipe.name: recipe for recipe in causal_recipes()}


@pytest.mark.parametrize(
    ("name", "num_layers", "reason"),
    [
        ("gemma3n_text", 1, "inputs of all layers from one table"),
        ("gemma3n_text", 3, "inputs of all layers from one table"),
        ("gemma4_text", 1, "inputs of all layers from one table"),
        ("longcat_flash", 1, "keeps its 4 layers in no list"),
    ],
)
def test_layers_that_cannot_run_alone(name: str, num_layers: int, reason: str) -> None:
    target = scorer_of(build(RECIPES[name]))
    with pytest.raises(UnsupportedModel, match=f"{reason}.*use another drafter"):
        EarlyExit(num_layers).bind(target)
