"""A checkpoint whose matrices are quantised, or stay halves, while they are read: it is never in memory whole and wide.

transformers gets a state in which each such matrix is one number seen many times: its place, no memory. The matrices
follow from their files, some rows at a time or as they are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from forerun.loading.quantise import own_rows, rows_at_once
from forerun.loading.stored import kept_half
from forerun.loading.tensor_files import model_tensors, read_rows, read_tensor, shape_of
from forerun.models.bodies.matrices import is_turned, may_hold


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
        embedding = sketch.get_input_embeddings()  # of a class of its own in some families
        left = set()
        for name, path in files.items():
            owner, _, last = name.rpartition(".")
            module = modules.get(owner)
            if module is None or last != "weight" or not (module is embedding or may_hold(module)):
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
                found[name] = torch.ones(1, dtype=self._dtype).expand(shape_of(path, name))
            else:
                found[name] = read_tensor(path, name).clone()
        return found

    def take(self, model: nn.Module) -> bool:
        """Note which parameters of the model, loaded with that state, are places only.

        False where transformers has written into one: some families' embeddings have a zero row that no file has.
        """
        named = model.named_parameters(remove_duplicate=False)
        places = {name: weight for name, weight in named if name in self.left}
        self._names = {id(weight): name for name, weight in places.items()}
        return all(map(_is_place, places.values()))

    def rows(self, weight: Tensor, is_turned: bool) -> Iterator[Tensor]:
        """The rows of a parameter, some at a time: from its file, unless it is more than a place."""
        name = self._names.get(id(weight))
        if name is None:
            yield from own_rows(weight, is_turned)
            return
        size = weight.shape[0 if is_turned else 1]
        yield from read_rows(self._files[name], name, rows_at_once(size), is_turned)

    def fill(self, model: nn.Module, keeping: Collection[nn.Module] = (), is_mapped: bool = False) -> None:
        """Read those that were not quantised after all: wide, or those of the modules `keeping` halves as halves.

        `is_mapped`: halves may stay in the memory of their file, of which then nearly all is in use.
        """
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for last, weight in module._parameters.items():
                if weight is None or (name := self._names.get(id(weight))) is None:
                    continue
                if id(weight) not in made:
                    stored, kept = read_tensor(self._files[name], name), None
                    if module in keeping:
                        kept = kept_half(stored if is_mapped else stored.clone(), is_turned(module))
                    made[id(weight)] = _wide(stored, self._dtype) if kept is None else kept
                module._parameters[last] = made[id(weight)]


def _is_place(weight: Tensor) -> bool:
    """Whether nobody has written into it; what transformers has copied is looked at whole."""
    part = weight.detach() if any(weight.stride()) else weight.detach()[:1, :1]
    return bool(part.eq(1).all())


def _wide(stored: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(stored.to(dtype, copy=True))
