"""What a forward pass must read, and that the pass which is timed is the model's."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from forerun import kernels
from forerun.bench.decode import forward
from forerun.bench.decode.forward import Forward, Pass
from forerun.bench.hardware import work_of
from forerun.errors import ForerunError
from support.interpreter import DEVICE, kernel_tests
from support.tiny import tiny_model

pytestmark = kernel_tests()


def test_bytes_of_a_pass() -> None:
    """Everything but the embeddings; two numbers a key head, dimension and layer of every key."""
    model = tiny_model("llama")
    everything = sum(weight.nbytes for weight in model.parameters())
    work, config = work_of(model), model.config
    assert work.weight_bytes == everything - model.get_input_embeddings().weight.nbytes
    assert work.bytes_per_key == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_share_of_the_ceiling() -> None:
    one = Pass("target", 1, 8, num_bytes=600, seconds=(3.0, 1.0, 2.0))
    assert one.name == "target 1x8"
    assert Forward(ceiling=400.0, passes=(one,)).share(one) == pytest.approx(0.75)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ForerunError, match="CUDA GPU"):
        forward.measure(tiny_model("llama"), tiny_model("llama"))


@pytest.mark.slow
def test_a_pass_is_repeated_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three new tokens behind nine old keys: the same logits each time, other ones with other keys."""
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    monkeypatch.setattr(forward, "CAPACITY", 64)
    monkeypatch.setattr(forward, "FILLED", 12)
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    step, other = (forward.stepper(model, 2, 3) for _ in range(2))
    first = step()
    assert first.shape == (6, model.config.vocab_size)
    assert torch.equal(step(), first)
    assert not torch.equal(other(), first), "keys are random and are read"
