"""Targets that other libraries quantised, with the libraries themselves where they are installed.

`pip install torchao compressed-tensors bitsandbytes optimum-quanto` for all of them; none is needed by Forerun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun import SpeculativeDecoder
from forerun.drafters import PromptLookup
from support.ties import check_greedy, deviation
from support.tiny import tiny_model

PROMPTS = [[5, 9, 3, 60, 2, 7, 11, 5, 9, 3], [8, 1, 8, 1, 8]]
NUMBER = 12
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def _torchao(config: str) -> Callable[[Any], Any]:
    def quantise(model: Any) -> Any:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, config)())
        return model

    return quantise


def _quanto(model: Any) -> Any:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def _compressed(model: Any) -> Any:
    """As the library runs a model of its own before it is compressed: forwards that are replaced."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    apply_quantization_config(model, QuantizationConfig(config_groups={"W8A8": ["Linear"]}))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            peak = module.weight.detach().abs().amax(dim=1, keepdim=True)
            module.weight_scale.data = (peak / 127).to(module.weight_scale.dtype).reshape(module.weight_scale.shape)
    return model


def _bitsandbytes(four_bits: bool) -> Callable[[Any], Any]:
    def quantise(model: Any) -> Any:
        library = pytest.importorskip("bitsandbytes").nn
        for module in list(model.model.layers.modules()):
            for name, layer in list(module.named_children()):
                if type(layer) is not torch.nn.Linear:
                    continue
                sizes: tuple[Any, ...] = (layer.in_features, layer.out_features, False)
                if four_bits:
                    made = library.Linear4bit(*sizes, quant_type="nf4", compute_dtype=torch.float32)
                    made.weight = library.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
                else:
                    made = library.Linear8bitLt(*sizes, has_fp16_weights=False)
                    made.weight = library.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
                setattr(module, name, made.to("cpu"))
        return model

    return quantise


LIBRARIES = {
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto int8": _quanto,
    "compressed-tensors w8a8": _compressed,
    "bitsandbytes nf4": _bitsandbytes(True),
    "bitsandbytes int8": _bitsandbytes(False),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_text_is_the_quantised_models(library: str) -> None:
    plain = tiny_model("llama", **WIDE)
    target = LIBRARIES[library](copy.deepcopy(plain)).eval()
    prompt = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        changed = (target(prompt).logits - plain(prompt).logits).abs().max()
    assert changed > 0, "the library left the model as it was"
    decoder = SpeculativeDecoder(target, PromptLookup(), policy=3, kernels="on")
    drafted = 0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = target.generate(ids, max_new_tokens=NUMBER, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = theirs[0, len(prompt) :].tolist()
        result = decoder.generate(ids, max_new_tokens=NUMBER, eos_token_id=[])
        check_greedy(target, prompt, result.new_tokens[0], expected, 2 * deviation(target, prompt + expected))
        drafted += result.stats.num_draft_tokens
    assert drafted > 0
    assert not decoder.engine.target.is_fused  # its weights are not what fused layers would read
