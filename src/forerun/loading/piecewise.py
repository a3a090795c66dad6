"""A checkpoint whose matrices are quantised while they are read, so that it never lies in memory whole and wide.

transformers gets a state in which each such matrix is one number seen many times: its place, no memory. The matrices
follow from their files, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from forerun.loading.quantise import is_matrix, own_rows, rows_at_once
from forerun.loading.stored import kept_half
from forerun.loading.tensor_files import model_tensors, read_rows, read_tensor, shape_of


class PiecewiseFolder:
    """A folder, and which of its tensors are read later."""

    def __init__(self, place: Path, files: dict[str, Path], left: frozenset[str], dtype: torch.dtype) -> None:
        self.place, self._files, self.left, self._dtype = place, files, left, dtype
        self._names: dict[int, str] = {}  # of the model's parameters that are places only

    @classmethod
    def of(cls, folder: Path, sketch: Any, dtype: torch.dtype) -> PiecewiseFolder | None:
        """For a model built on the meta device; None where transformers does more than copy tensors by their names."""
        files = model_tensors(folder, sketch.config)
        if files is None or get_model_conversion_mapping(sketch, add_legacy=False):
            return None
        modules = dict(sketch.named_modules(remove_duplicate=False))
        left = set()
        for name, path in files.items():
            owner, _, last = name.rpartition(".")
            module = modules.get(owner)
            if module is None or last != "weight" or not is_matrix(module):
                continue
            if tuple(module._parameters["weight"].shape) == shape_of(path, name):
                left.add(name)
        # Whether two matrices are one is for transformers to see where the files have both: places are all alike.
        for pair in getattr(sketch, "all_tied_weights_keys", {}).items():
            if files.keys() >= set(pair):
                left -= set(pair)
        return cls(folder, files, frozenset(left), dtype)

    def state(self) -> dict[str, Tensor]:
        """For transformers. What is kept is copied: a view would keep its whole file mapped."""
        found = {}
        for name, path in self._files.items():
            if name in self.left:
                found[name] = torch.zeros(1, dtype=self._dtype).expand(shape_of(path, name))
            else:
                found[name] = read_tensor(path, name).clone()
        return found

    def take(self, model: nn.Module) -> None:
        """Note which parameters of the model, loaded with that state, are places only."""
        named = model.named_parameters(remove_duplicate=False)
        self._names = {id(weight): name for name, weight in named if name in self.left}

    def rows(self, weight: Tensor) -> Iterator[Tensor]:
        """The rows of a parameter, some at a time: from its file, unless it is more than a place."""
        name = self._names.get(id(weight))
        if name is None:
            yield from own_rows(weight)
            return
        yield from read_rows(self._files[name], name, rows_at_once(weight.shape[1]))

    def fill(self, model: nn.Module, keeps_halves: bool) -> None:
        """Read those that were not quantised after all, wide or as they are stored."""
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for last, weight in module._parameters.items():
                if weight is None or (name := self._names.get(id(weight))) is None:
                    continue
                if id(weight) not in made:
                    stored = nn.Parameter(read_tensor(self._files[name], name).clone(), requires_grad=False)
                    made[id(weight)] = kept_half(module, last, stored) if keeps_halves else _wide(stored, self._dtype)
                module._parameters[last] = made[id(weight)]


def _wide(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(dtype))
