"""Rounding a model's linear layers while it goes to its device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.kernels.scaled import ScaledWeight
from forerun.loading import rounding
from forerun.loading.quantise import check_scheme
from forerun.math import scaled
from forerun.math.scaled import SCHEMES
from support.described import described_model
from support.tiny import tiny_model

CPU = torch.device("cpu")


def rounded(scheme: str, family: str = "llama", **options: bool) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model(family))
    rounding.round_weights(model, scheme, CPU, "tiny", **options)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(torch.tensor([[3, 5, 9, 2]])).logits
    return made


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "fp8"])
def test_layers_are_rounded_and_the_rest_is_not(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "AT_ONCE", 100)  # a few rows at a time
    before = tiny_model("llama")
    model = rounded(scheme)
    kinds = {name: type(module.weight) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert kinds.pop("lm_head") is torch.nn.Parameter
    assert kinds and set(kinds.values()) == {ScaledWeight}
    for name, weight in model.named_parameters():
        right = dict(before.named_parameters())[name]
        if not isinstance(weight, ScaledWeight):
            assert torch.equal(weight, right)
        else:
            values, scales = scaled.rounded_weight(right, SCHEMES[scheme], right.dtype)
            assert torch.equal(weight.raw.float(), values.float()) and torch.equal(weight.scales, scales)
            assert weight.shape == right.shape and weight.dtype == right.dtype and not weight.requires_grad
    error = float((logits(model) - logits(before)).norm() / logits(before).norm())
    assert 1e-5 < error < 0.2


def test_routers_stay_as_they_are() -> None:
    """LongCat's is a linear layer, whose scores the model computes in float32."""
    model = copy.deepcopy(described_model("longcat_flash"))
    rounding.round_weights(model, "int8", CPU, "tiny")
    kinds = {name: type(weight) for name, weight in model.named_parameters()}
    assert all(kind is torch.nn.Parameter for name, kind in kinds.items() if ".router." in name)
    assert any(kind is ScaledWeight for name, kind in kinds.items() if ".mlps." in name)
    assert any(".router." in name for name in kinds), "a name that no longer exists would hold nothing"


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_is_rounded_by_choice(is_tied: bool) -> None:
    """A head that is the embedding becomes a matrix of its own: look-ups stay as they were."""
    model = copy.deepcopy(tiny_model("llama", tie_word_embeddings=is_tied))
    wide = model.get_input_embeddings().weight
    assert (model.lm_head.weight is wide) == is_tied
    right = scaled.rounded_weight(model.lm_head.weight, SCHEMES["int8"], torch.float32)
    rounding.round_weights(model, "int8", CPU, "tiny", with_head=True)
    assert isinstance(model.lm_head.weight, ScaledWeight) and not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight.raw, right[0]) and torch.equal(model.lm_head.weight.scales, right[1])
    assert model.get_input_embeddings().weight is wide


def test_a_rounded_weight_is_a_tensor_to_whoever_looks_at_it() -> None:
    model = rounded("int8")
    weight = model.base_model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight + 0, weight.dense()) and torch.equal(weight.T, weight.dense().T)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    assert isinstance(twin.base_model.layers[0].mlp.up_proj.weight, ScaledWeight)
    assert torch.equal(logits(model.to("cpu")), logits(twin))
    x = torch.randn(3, weight.shape[1], requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.dense().sum(0).expand(3, -1))


@pytest.mark.parametrize("change", [
    lambda w: w.requires_grad_(), lambda w: w.zero_(), lambda w: w.__setitem__(0, 1.0),
], ids=["train", "in place", "item"])  # fmt: skip
def test_what_cannot_be_done_to_it(change: object) -> None:
    weight = rounded("int8").base_model.layers[0].mlp.up_proj.weight
    with pytest.raises(InvalidArgument, match="without quantize="):
        change(weight)  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match="cannot become others"):
        rounded("fp8").double()


def test_a_weight_says_where_it_lies() -> None:
    """Between two GPUs `model.to` sets a parameter's data; between kinds of devices it makes another parameter."""
    model = rounded("int8")
    weight = model.base_model.layers[0].mlp.up_proj.weight
    with pytest.raises(InvalidArgument, match="on cpu cannot be set to some on meta; load the model with device="):
        weight.data = weight.to("meta")
    assert weight.device == weight.raw.device == weight.scales.device == CPU
    moved = model.to("meta").base_model.layers[0].mlp.up_proj.weight
    assert isinstance(moved, ScaledWeight) and moved.device == moved.raw.device == torch.device("meta")


def test_bad_input() -> None:
    with pytest.raises(InvalidArgument, match="48 inputs, which no group of 128, 64, 32 divides; use 'int8'"):
        rounded("int4")
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.base_model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(InvalidArgument, match=r"layers\.1\.mlp\.up_proj holds a number that is infinite or none"):
        rounding.round_weights(model, "int8", CPU, "tiny")
    with pytest.raises(InvalidArgument, match="no linear layer"):
        rounded("int8", "gpt2")
    assert "there are 'int8', 'w8a8', 'fp8', 'int4'" in str(rounding.why_not("int3", CPU))
    with pytest.raises(
        InvalidArgument, match="'fp8' is for a GPU; on a CPU there are 'int8', 'w8a8', 'w8a8-g32', 'int4'"
    ):
        check_scheme("fp8", CPU, torch.float32)
    with pytest.raises(InvalidArgument, match="'int3' is unknown; there are"):
        check_scheme("int3", CPU, torch.float32)
    with pytest.raises(InvalidArgument, match="not for 'meta'"):
        check_scheme("int8", torch.device("meta"), torch.float32)
