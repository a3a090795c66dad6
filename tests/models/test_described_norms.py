"""Norms as readers describe them, in sixteen bits, where the order of roundings shows: the bits of the family's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forerun.math.skinny import normed
from forerun.models.bodies.parts import read_norm
from forerun.models.bodies.untouched import text_model
from support.described import FAMILIES, described_model


def norms(family: str) -> dict[str, Any]:
    """One of each class and shape."""
    found = {}
    for module in text_model(described_model(family).bfloat16()).modules():
        if type(module).__name__.endswith(("Norm", "LayerNorm1P")):
            found[f"{type(module).__name__} {[tuple(p.shape) for p in module.parameters()]}"] = module
    return found


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_the_modules(family: str) -> None:
    found = norms(family)
    assert found
    for name, module in found.items():
        weight = next(module.parameters(), None)
        shape = module.normalized_shape if weight is None else weight.shape
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.5)
        x = 3 * torch.randn(64, *shape).bfloat16()
        norm = read_norm(module, x)
        assert norm is not None
        got, want = normed(x, norm), module(x)
        assert torch.equal(got, want), name
