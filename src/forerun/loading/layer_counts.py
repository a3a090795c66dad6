"""Layer counts of a config.json that no weights could fill: building such a model would take for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.errors import UnsupportedModel

LARGEST = 1024  # layers; the deepest published models have a few hundred
SUFFIXES = ("layers", "n_layer")  # num_hidden_layers, decoder_layers, n_layer ...


def check_layer_counts(config: Mapping[str, Any], name: str) -> None:
    """Raise `UnsupportedModel` before anything is built from `config`, the contents of a config.json."""
    for field, count in _counts(config):
        if count > LARGEST:
            raise UnsupportedModel(
                f"{name!r} has {field}={count} in its config.json; no model has more than {LARGEST} layers: check the "
                "file, or fetch it again"
            )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif type(value) is int and field.endswith(SUFFIXES):
            yield field, value
