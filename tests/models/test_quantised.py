"""What is said of a model's weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.loading.rounding import round_weights
from forerun.models.quantised import METHODS, describe_weights, method_of
from support.tiny import tiny_model


def model() -> PreTrainedModel:
    return copy.deepcopy(tiny_model("llama"))


def test_plain_and_rounded_weights() -> None:
    assert describe_weights(model()) == "plain float32"
    rounded = model()
    round_weights(rounded, "fp8", torch.device("cpu"), "tiny")
    assert describe_weights(rounded).startswith("rounded on load (fp8 x 14): text follows")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["dictionary", "object"])
def test_methods_of_others_are_named(method: str, form: str) -> None:
    other = model()
    config: Any = {"quant_method": method}
    other.config.quantization_config = config if form == "dictionary" else SimpleNamespace(quant_method=method)
    assert method_of(other) == method
    assert describe_weights(other) == (
        f"quantised by {METHODS[method]}: run by its own modules, not by fused layers; "
        "text follows the quantised weights"
    )


class Odd(torch.Tensor):
    """A weight whose numbers lie elsewhere."""


def test_weights_of_a_type_that_nobody_announced() -> None:
    other = model()
    layer = other.base_model.layers[0].mlp.up_proj
    layer._parameters["weight"] = nn.Parameter(layer.weight.data.as_subclass(Odd), requires_grad=False)
    assert "Odd x 1" in describe_weights(other)
