"""Whether a configuration and the weights beside it are of one size, found out before memory is taken for a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from forerun.errors import UnsupportedModel

MOST_LAYERS = 1024  # the deepest published models have a few hundred
# How the fields of config.json end that count layers: num_hidden_layers, decoder_layers, n_layer ...
LAYER_COUNTS = ("layers", "n_layer")
PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
PACKED_VALUES = 16  # in one value of another type: an int32 holds sixteen numbers of two bits
SPARE = 2  # a head that is tied to the embedding is stored once and may be counted twice
REMEDY = "check the file, or fetch it again"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What files of weights hold."""

    num_tensors: int
    num_values: int  # at most so many numbers

    @classmethod
    def of_folder(cls, folder: Path) -> StoredWeights | None:
        """From the headers of a folder's safetensors files; None where it has none."""
        sizes = []
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (the file is no dictionary)
                    part = file.get_slice(name)
                    values = math.prod(part.get_shape())
                    plain = part.get_dtype() in PLAIN_TYPES
                    sizes.append(values if plain else values * PACKED_VALUES)
        return cls(len(sizes), sum(sizes)) if sizes else None

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> StoredWeights:
        return cls(len(tensors), sum(tensor.numel() for tensor in tensors.values()))


def check_layer_counts(config: Mapping[str, Any], name: str, stored: StoredWeights | None = None) -> None:
    """Raise before anything is built from `config`, the contents of a config.json: some configurations make lists of
    all layers. Every layer has a tensor at least."""
    most = MOST_LAYERS if stored is None else min(MOST_LAYERS, stored.num_tensors)
    for field, count in _layer_counts(config):
        if count > most:
            why = (
                f"no model has more than {MOST_LAYERS} layers"
                if count > MOST_LAYERS
                else f"its files hold {most} tensors"
            )
            raise UnsupportedModel(f"{name!r} has {field}={count} in its config.json; {why}: {REMEDY}")


def check_size(sketch: nn.Module, stored: StoredWeights, name: str, lent: int = 0) -> None:
    """Raise where a model, built on the meta device, has far more parameters than are stored, or `lent` by another."""
    needed = sum(parameter.numel() for parameter in sketch.parameters())
    if needed > SPARE * (stored.num_values + lent):
        raise UnsupportedModel(
            f"{name!r} asks for {needed:,} parameters in its config.json and its files hold {stored.num_values:,}: "
            f"{REMEDY}"
        )


def _layer_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_counts(value)
        elif type(value) is int and field.endswith(LAYER_COUNTS):
            yield field, value
