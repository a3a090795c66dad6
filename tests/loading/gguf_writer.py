"""Writes small GGUF files, so that the reader is tested against something that is not itself."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ALIGNMENT = 32
VALUE_TYPES = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
               "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A metadata value with the type it is written in."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Raw:
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]  # torch's order
    kind: int
    data: bytes


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Raw], version: int = 3) -> Path:
    """Strings, lists of strings, and `Typed` values are understood as metadata."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, raw in tensors.items():
        out += _string(name) + struct.pack(f"<I{len(raw.shape)}Q", len(raw.shape), *reversed(raw.shape))
        out += struct.pack("<IQ", raw.kind, offset)
        offset += _padded(len(raw.data))
    out += bytes(_padded(len(out)) - len(out))
    for raw in tensors.values():
        out += raw.data + bytes(_padded(len(raw.data)) - len(raw.data))
    path.write_bytes(out)
    return path


def plain(tensor: Tensor) -> Raw:
    """A float32 tensor."""
    return Raw(tuple(tensor.shape), 0, struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist()))


def halved(raw: Raw) -> Raw:
    """The same float32 tensor in half precision."""
    values = torch.frombuffer(bytearray(raw.data), dtype=torch.float32).half()
    return Raw(raw.shape, 1, values.numpy().tobytes())


def _padded(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    number, letter = VALUE_TYPES[value.kind]
    if isinstance(value.value, list):
        return struct.pack(f"<IIQ{len(value.value)}{letter}", 9, number, len(value.value), *value.value)
    return struct.pack(f"<I{letter}", number, value.value)


# A whole little Llama

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789ĠĊ", "ab", "Ġa", "ĠĠ"]
MERGES = ["a b", "Ġ a", "Ġ Ġ"]


def tiny_llama(*, tied: bool, hidden: int = 32, inner: int = 48) -> LlamaForCausalLM:
    """Grouped heads, so that queries and keys need different permutations."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=len(TOKENS), hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
                         rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, initializer_range=0.3,
                         tie_word_embeddings=tied)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def llama_metadata(model: LlamaForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "general.architecture": "llama",
        "llama.block_count": Typed("u32", config.num_hidden_layers),
        "llama.context_length": Typed("u32", config.max_position_embeddings),
        "llama.embedding_length": Typed("u32", config.hidden_size),
        "llama.feed_forward_length": Typed("u32", config.intermediate_size),
        "llama.attention.head_count": Typed("u32", config.num_attention_heads),
        "llama.attention.head_count_kv": Typed("u32", config.num_key_value_heads),
        "llama.attention.layer_norm_rms_epsilon": Typed("f32", config.rms_norm_eps),
        "llama.rope.freq_base": Typed("f32", 5000.0),
        "llama.vocab_size": Typed("u32", config.vocab_size),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": Typed("i32", [3, 3, 3] + [1] * (len(TOKENS) - 3)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": Typed("u32", 1),
        "tokenizer.ggml.eos_token_id": Typed("u32", 2),
        "tokenizer.ggml.unknown_token_id": Typed("u32", 0),
        "tokenizer.ggml.padding_token_id": Typed("u32", 2),
        "tokenizer.ggml.add_bos_token": Typed("bool", False),
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }


def llama_tensors(model: LlamaForCausalLM) -> dict[str, Raw]:
    """The model's tensors under GGUF's names; rotary pairs are put side by side, one row at a time."""
    inner = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not model.config.tie_word_embeddings:
        outer["lm_head.weight"] = "output.weight"
    weights = model.state_dict()
    tensors = {name: plain(weights[key]) for key, name in outer.items()}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for layer in range(model.config.num_hidden_layers):
        for part, name in inner.items():
            weight = weights[f"model.layers.{layer}.{part}.weight"]
            tensors[f"blk.{layer}.{name}.weight"] = plain(pair_rows(weight, heads[name]) if name in heads else weight)
    return tensors


def pair_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Row i of a head's first half, then row i of its second half, and so on."""
    size = weight.shape[0] // num_heads
    order = [h * size + i + half * size // 2 for h in range(num_heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_llama(
    path: Path, *, tied: bool = True, change: Callable[[dict[str, Any]], Any] = lambda metadata: None
) -> Path:
    """The tiny Llama as a file; `change` may edit the metadata first."""
    model = tiny_llama(tied=tied)
    metadata = llama_metadata(model)
    change(metadata)
    return write_gguf(path, metadata, llama_tensors(model))
