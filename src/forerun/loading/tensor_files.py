"""The tensors of a local folder's safetensors files, read one by one: nothing of a file stays mapped behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from forerun.files import parse_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # as peft names it
CONFIG, GENERATION = "config.json", "generation_config.json"


def model_tensors(folder: Path, config: Any) -> dict[str, Path] | None:
    """By name, the file of every tensor that transformers makes this model of; None where it reads other files.

    A folder may hold more: another precision, an adapter, shards of an earlier revision. A configuration may name other
    weights, and so may an adapter's.
    """
    if (folder / ADAPTER).is_file() or getattr(config, "transformers_weights", None):
        return None
    if (folder / WHOLE).is_file():
        return dict.fromkeys(_names(folder / WHOLE), folder / WHOLE)
    if not (folder / INDEX).is_file():
        return None
    places = parse_json((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return {name: folder / file for name, file in places.items()}


def shape_of(path: Path, name: str) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as file:
        return tuple(file.get_slice(name).get_shape())


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor, which may lie in the file's own memory."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def read_rows(path: Path, name: str, count: int, is_turned: bool = False) -> Iterator[Tensor]:
    """`count` rows of a matrix at a time, or columns as rows, copied: a view would keep all that was read in memory."""
    rows = shape_of(path, name)[1 if is_turned else 0]
    for first in range(0, rows, count):
        with safe_open(path, framework="pt") as file:
            whole, some = file.get_slice(name), slice(first, min(first + count, rows))
            part: Tensor = (whole[:, some].T if is_turned else whole[some]).clone()
        yield part


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
