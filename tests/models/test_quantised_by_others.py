"""Targets that other libraries quantised, with the libraries themselves where they are installed.

`pip install torchao compressed-tensors bitsandbytes optimum-quanto` for all of them; none is needed by Forerun. Folders
in the layout of DeepSeek's 8-bit floats are written here: transformers reads them by itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forerun import SpeculativeDecoder
from forerun.drafters import PromptLookup
from forerun.loading.load import LoadRequest
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


BLOCK = 128  # rows and columns of a weight that share a scale


def _in_fine_grained_floats(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model in blocks of 8-bit floats; the values that its layers then have, by name."""
    model.save_pretrained(folder)
    stored, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if ".layers." in name and name.endswith("proj.weight")]:
        rows, columns = stored[name].shape
        padded = torch.nn.functional.pad(stored[name], (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [., 128, ., 128]
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        numbers = (blocks / scales).to(torch.float8_e4m3fn)
        values[name] = (numbers.float() * scales).flatten(2).flatten(0, 1)[:rows, :columns]
        stored[name] = numbers.float().flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    says = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": says}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_fine_grained_floats_become_plain_weights_on_a_cpu(tmp_path: Path) -> None:
    """transformers has no products for them there: it widens them, to the type that it is asked for."""
    plain = tiny_model("llama", **WIDE)
    values = _in_fine_grained_floats(copy.deepcopy(plain), tmp_path)
    request = LoadRequest.of(tmp_path, torch.float32, "cpu")
    target = request.model("a causal model", lambda config: AutoModelForCausalLM)
    state = target.state_dict()
    assert values and all(torch.equal(state[name], right) for name, right in values.items())
    assert not torch.equal(state[name := next(iter(values))], plain.state_dict()[name])
    decoder = SpeculativeDecoder(target, PromptLookup(), policy=3, kernels="on")
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        theirs = target.generate(ids, max_new_tokens=NUMBER, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = theirs[0, ids.shape[1] :].tolist()
    result = decoder.generate(ids, max_new_tokens=NUMBER, eos_token_id=[])
    check_greedy(target, PROMPTS[0], result.new_tokens[0], expected, 1e-4)
