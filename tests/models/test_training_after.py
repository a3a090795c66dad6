"""Whoever has decoded with a model can train it afterwards: nothing of its own has become an inference tensor."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun import DraftModel, SpeculativeDecoder
from forerun.models.bodies.merging import merged
from support.devices import on_gpu
from support.seq2seq import batch_of, rows_of
from support.tiny import EXTRA_FAMILIES, FAMILIES, SEQ2SEQ_FAMILIES, tiny_model

TEXTS = torch.tensor([[5, 11, 3, 60, 7], [8, 90, 4, 31, 2]])


def own_model(family: str, device: str) -> PreTrainedModel:
    return copy.deepcopy(tiny_model(family)).to(device).requires_grad_(True)


def given(family: str, device: str) -> dict[str, Any]:
    inputs = batch_of(family, rows_of(family)) if family in SEQ2SEQ_FAMILIES else {"input_ids": TEXTS}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def gradients(model: PreTrainedModel, family: str) -> list[Tensor | None]:
    inputs = given(family, str(model.device))
    labels = inputs["input_ids"] if "input_ids" in inputs else TEXTS[:1].to(model.device)
    if family == "whisper":
        labels = labels.repeat(len(inputs["input_features"]), 1)
    model(**inputs, labels=labels).loss.backward()
    return [weight.grad for weight in model.parameters()]


def check_trains(model: PreTrainedModel, family: str) -> None:
    """No tensor of the model's is an inference tensor, and it learns what a model would that has never decoded."""
    named = chain(model.named_parameters(), model.named_buffers())
    assert not [name for name, tensor in named if tensor.is_inference()]
    wanted, found = gradients(own_model(family, str(model.device)), family), gradients(model, family)
    assert [own is None for own in found] == [right is None for right in wanted]
    pairs = [(own, right) for own, right in zip(found, wanted, strict=True) if own is not None and right is not None]
    whole = torch.stack([right.norm() for _, right in pairs]).norm()
    assert whole > 0 and all((own - right).norm() <= 1e-4 * whole for own, right in pairs)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *((family, "cpu") for family in (*FAMILIES, *EXTRA_FAMILIES, *SEQ2SEQ_FAMILIES)),
        *(pytest.param(family, "cuda", marks=on_gpu) for family in ("llama", "qwen3", "gemma3", "codegen", "t5")),
    ],
)
@pytest.mark.quick(every=3)
def test_a_model_learns_after_a_call(family: str, device: str) -> None:
    model, draft = own_model(family, device), own_model(family, device)
    decoder = SpeculativeDecoder(model, DraftModel(draft), policy=2, compile=False)
    decoder.generate(**given(family, device), max_new_tokens=6)
    check_trains(model, family)
    check_trains(draft, family)


def test_weights_merged_in_inference_mode_learn() -> None:
    parts = [nn.Linear(6, 4), nn.Linear(6, 3)]
    x = torch.randn(5, 6)
    with torch.inference_mode():
        whole, _ = merged(parts)
    torch.cat([part(x) for part in parts], dim=-1).sum().backward()
    before = whole.clone()
    torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.1).step()
    torch.testing.assert_close(whole, before - 0.1 * x.sum(0).expand(7, 6))


def test_weights_that_cannot_learn_are_merged_all_the_same() -> None:
    """Loaded in inference mode, or frozen."""
    with torch.inference_mode():
        loaded = [nn.Linear(6, 4), nn.Linear(6, 3)]
        want = torch.cat([part.weight for part in loaded])
    assert torch.equal(merged(loaded)[0], want)
    frozen = [nn.Linear(6, 4).requires_grad_(False), nn.Linear(6, 3)]
    merged(frozen)
    assert [part.weight.requires_grad for part in frozen] == [False, True]
