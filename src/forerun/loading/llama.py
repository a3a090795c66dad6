"""A Llama in a GGUF file, in the names and the order of rows that transformers expects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from forerun.errors import UnsupportedModel
from forerun.loading.gguf import GgufFile
from forerun.loading.rotary import FACTORS
from forerun.math.blocks import BlockFormat

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def llama_config(file: GgufFile) -> Any:
    """The `LlamaConfig` that the file's metadata describes."""
    from transformers import LlamaConfig

    _refuse_what_is_not_plain(file)
    heads, width = file.need("llama.attention.head_count"), file.need("llama.embedding_length")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=file.records["token_embd.weight"].shape[0],
        hidden_size=width,
        intermediate_size=file.need("llama.feed_forward_length"),
        num_hidden_layers=file.need("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.metadata.get("llama.attention.head_count_kv", heads),
        head_dim=width // heads,
        max_position_embeddings=file.need("llama.context_length"),
        rms_norm_eps=file.need("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": file.metadata.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in file.records,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def llama_weights(file: GgufFile) -> dict[str, Tensor]:
    """Every tensor of the file, float32, under its name in `LlamaForCausalLM`."""
    return {
        _model_name(file, name): record.format.decode(llama_rows(file, name).flatten()).view(record.shape)
        for name, record in file.records.items()
    }


def is_llama(file: GgufFile) -> bool:
    return bool(file.metadata.get("general.architecture") == "llama")


def llama_names(file: GgufFile) -> dict[str, str]:
    """Of every tensor its name in `LlamaForCausalLM` and in the file. Factors of frequencies are a configuration's."""
    return {_model_name(file, name): name for name in file.records if name not in FACTORS}


def llama_blocks(file: GgufFile) -> Iterator[tuple[str, Tensor, BlockFormat]]:
    """The file's matrices as they are stored: name in `LlamaForCausalLM`, bytes [rows, bytes of a row], format."""
    for name, record in file.records.items():
        if len(record.shape) == 2:
            yield _model_name(file, name), llama_rows(file, name), record.format


def _refuse_what_is_not_plain(file: GgufFile) -> None:
    if (family := file.need("general.architecture")) != "llama":
        raise UnsupportedModel(f"{file.path} holds a {family!r} model; this reader knows 'llama' alone")
    if scaled := sorted(key for key in file.metadata if key.startswith("llama.rope.scaling.")):
        raise UnsupportedModel(
            f"{file.path} scales its rotary frequencies ({', '.join(scaled)}), which this reader does not do"
        )


def _model_name(file: GgufFile, name: str) -> str:
    """What transformers calls a tensor of the file."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INNER:
        raise UnsupportedModel(f"{file.path}: a plain Llama has no tensor {name!r}; this file needs another loader")
    layer, part = match.groups()
    return f"model.layers.{layer}.{_INNER[part]}.weight"


def llama_rows(file: GgufFile, name: str) -> Tensor:
    """A tensor's bytes [rows, bytes of a row], rows in transformers' order."""
    raw = file.stored(name).view(file.records[name].shape[0], -1)
    heads = file.need("llama.attention.head_count")
    if name.endswith("attn_q.weight"):
        return unpair_rotary_rows(raw, heads)
    if name.endswith("attn_k.weight"):
        return unpair_rotary_rows(raw, file.metadata.get("llama.attention.head_count_kv", heads))
    return raw


def unpair_rotary_rows(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF keeps the two rows that one rotary frequency turns side by side, transformers half a head apart."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
