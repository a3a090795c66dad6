"""What a configuration says before memory is taken for a model: whether the weights beside it are of its size, and
whether it can be split over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from forerun.errors import UnsupportedModel
from forerun.loading.tensor_files import model_tensors

MOST_LAYERS = 1024  # the deepest published models have a few hundred
# How the fields of config.json end that count layers: num_hidden_layers, decoder_layers, n_layer ...
LAYER_COUNTS = ("layers", "n_layer")
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
PACKED_VALUES = 16  # in one value of another type: an int32 holds sixteen numbers of two bits
SPARE = 2  # a head that is tied to the embedding is stored once and may be counted twice
SMALL = 1 << 24  # parameters that may be computed instead of stored, such as positions
REMEDY = "check the file, or fetch it again"
ATTENTION = ("q_proj", "k_proj", "qkv_proj", "query_key_value")  # whose outputs are heads


def check_layer_counts(config: Mapping[str, Any], name: str) -> None:
    """Raise before anything is built from `config`, the contents of a config.json: some configurations make lists of
    all layers, and so does a sketch of the model."""
    for field, count in _layer_counts(config):
        if count > MOST_LAYERS:
            raise UnsupportedModel(
                f"{name!r} has {field}={count} in its configuration; no model has more than {MOST_LAYERS} layers: "
                f"{REMEDY}"
            )


def stored_values(folder: Path, config: Any) -> int | None:
    """How many numbers a model's safetensors files hold at most, by their headers; None where it has none."""
    sizes = [values if kind in PLAIN_TYPES else values * PACKED_VALUES for kind, values in _headers(folder, config)]
    return sum(sizes) if sizes else None


def stored_types(folder: Path, config: Any) -> set[str]:
    """The types of numbers that a model's safetensors files hold, by the names in their headers."""
    return {kind for kind, _ in _headers(folder, config)}


def _headers(folder: Path, config: Any) -> Iterator[tuple[str, int]]:
    """Type and number of values of every tensor in the files that the model is made of."""
    for path in sorted(set((model_tensors(folder, config) or {}).values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (the file is no dictionary)
                part = file.get_slice(name)
                yield part.get_dtype(), math.prod(part.get_shape())


def check_size(sketch: nn.Module, stored: int, name: str) -> None:
    """Raise where a model, built on the meta device, has far more parameters than its files hold numbers."""
    needed = sum(parameter.numel() for parameter in sketch.parameters())
    if needed > SPARE * stored + SMALL:
        raise UnsupportedModel(
            f"{name!r} asks for {needed:,} parameters in its configuration and its files hold {stored:,}: {REMEDY}"
        )


def check_divides(config: Any, size: int, name: str) -> None:
    """Refuse a model that transformers has no plan for, or whose heads do not divide by the number of processes."""
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if config.is_encoder_decoder or not plan:
        raise UnsupportedModel(
            f"{name!r} cannot be split over {size} processes: transformers has no tensor parallel plan for "
            f"{text.model_type!r}; load it whole"
        )
    if not any(key.rsplit(".", 1)[-1] in ATTENTION and style == "colwise" for key, style in plan.items()):
        return  # every process has all heads
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or shared % size:
        sizes = [str(n) for n in range(1, math.gcd(heads, shared) + 1) if math.gcd(heads, shared) % n == 0]
        raise UnsupportedModel(
            f"{name!r} has {heads} heads of attention and {shared} of keys, which do not divide by {size} processes; "
            f"use {' or '.join(sizes)}"
        )


def _layer_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_counts(value)
        elif type(value) is int and field.endswith(LAYER_COUNTS):
            yield field, value
