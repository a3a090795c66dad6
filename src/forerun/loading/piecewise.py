"""A checkpoint whose matrices are quantised, or stay as they are stored, while they are read: it is never in memory
whole and wide.

transformers gets a state in which each such matrix is one number seen many times: its place, no memory. The matrices
follow from their files, some rows at a time or as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from forerun.errors import UnsupportedModel
from forerun.kernels.cpu.narrow import narrow_parameter
from forerun.loading.gguf import GgufFile, read_gguf
from forerun.loading.llama import is_llama, llama_names, llama_rows
from forerun.loading.quantise import own_rows, rows_at_once
from forerun.loading.stored import can_keep_blocks, kept_half
from forerun.loading.tensor_files import model_tensors, read_rows, read_tensor, shape_of
from forerun.models.bodies.matrices import is_turned, may_hold


class StoredTensor(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """All of it, as numbers; it may lie in the file's own memory."""
        ...

    def rows(self, count: int, is_turned: bool) -> Iterator[Tensor]:
        """So many rows at a time, or columns as rows, copied: a view would keep all that was read in memory."""
        ...

    def kept(self, is_turned: bool, is_mapped: bool) -> nn.Parameter | None:
        """As it is stored, in the memory of the file where that `is_mapped`; None where it must be wide."""
        ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One of a safetensors file."""

    path: Path
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.path, self.name)

    def read(self) -> Tensor:
        return read_tensor(self.path, self.name)

    def rows(self, count: int, is_turned: bool) -> Iterator[Tensor]:
        return read_rows(self.path, self.name, count, is_turned)

    def kept(self, is_turned: bool, is_mapped: bool) -> nn.Parameter | None:
        stored = self.read()
        return kept_half(stored if is_mapped else stored.clone(), is_turned)


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """One of a GGUF file; of a matrix, rows in transformers' order."""

    file: GgufFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.records[self.name].shape

    def read(self) -> Tensor:
        if len(self.shape) != 2:
            return self.file.tensor(self.name)
        return self._decoded(llama_rows(self.file, self.name))

    def rows(self, count: int, is_turned: bool) -> Iterator[Tensor]:
        assert not is_turned  # a Llama's matrices have their outputs first
        return map(self._decoded, llama_rows(self.file, self.name).split(count))

    def kept(self, is_turned: bool, is_mapped: bool) -> nn.Parameter | None:
        """Copied: the file may be replaced while we run."""
        stored = self.file.records[self.name].format
        if len(self.shape) != 2 or not can_keep_blocks(stored, self.shape[1]):
            return None
        return narrow_parameter(llama_rows(self.file, self.name).clone(), stored)

    def _decoded(self, rows: Tensor) -> Tensor:
        return self.file.records[self.name].format.decode(rows.flatten()).view(len(rows), self.shape[1])


class Piecewise:
    """The tensors of a checkpoint by their names in the model, and which of them are read later."""

    def __init__(self, tensors: Mapping[str, StoredTensor], left: frozenset[str], dtype: torch.dtype) -> None:
        self._tensors, self.left, self._dtype = tensors, left, dtype
        self._names: dict[int, str] = {}  # of the model's parameters that are places only

    @classmethod
    def of_folder(cls, folder: Path, sketch: Any, dtype: torch.dtype) -> Piecewise | None:
        """For a model built on the meta device; None where transformers does more than copy tensors by their names."""
        files = model_tensors(folder, sketch.config)
        if files is None or get_model_conversion_mapping(sketch, add_legacy=False):
            return None
        return cls._of({name: FileTensor(path, name) for name, path in files.items()}, sketch, dtype)

    @classmethod
    def of_gguf(cls, path: Path, sketch: Any, dtype: torch.dtype) -> Piecewise | None:
        """The same of a GGUF file; None where it is no plain Llama's, or has blocks that only transformers decodes, or
        tensors of other shapes than its metadata says: an embedding of more words than are named, say."""
        file = read_gguf(path, skips_unknown=True)
        if file.unread or not is_llama(file) or get_model_conversion_mapping(sketch, add_legacy=False):
            return None
        try:
            names = llama_names(file)
        except UnsupportedModel:
            return None
        shapes = {name: tuple(weight.shape) for name, weight in sketch.named_parameters(remove_duplicate=False)}
        tensors = {ours: BlockTensor(file, name) for ours, name in names.items()}
        if any(shapes.get(ours, tensor.shape) != tensor.shape for ours, tensor in tensors.items()):
            return None
        return cls._of(tensors, sketch, dtype)

    @classmethod
    def _of(cls, tensors: Mapping[str, StoredTensor], sketch: Any, dtype: torch.dtype) -> Piecewise:
        modules = dict(sketch.named_modules(remove_duplicate=False))
        embedding = sketch.get_input_embeddings()  # of a class of its own in some families
        left = set()
        for name, tensor in tensors.items():
            owner, _, last = name.rpartition(".")
            module = modules.get(owner)
            if module is None or last != "weight" or not (module is embedding or may_hold(module)):
                continue
            if tuple(module._parameters["weight"].shape) == tensor.shape:
                left.add(name)
        # Whether two matrices are one is for transformers to see where the files have both: places are all alike.
        for pair in getattr(sketch, "all_tied_weights_keys", {}).items():
            if tensors.keys() >= set(pair):
                left -= set(pair)
        return cls(tensors, frozenset(left), dtype)

    @property
    def num_values(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def state(self) -> dict[str, Tensor]:
        """For transformers. What is kept is copied: a view would keep its whole file mapped."""
        tensors = {}
        for name, tensor in self._tensors.items():
            if name in self.left:
                tensors[name] = torch.ones(1, dtype=self._dtype).expand(tensor.shape)
            else:
                tensors[name] = tensor.read().clone()
        return tensors

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
        yield from self._tensors[name].rows(rows_at_once(size), is_turned)

    def fill(self, model: nn.Module, keeping: Collection[nn.Module] = (), is_mapped: bool = False) -> None:
        """Read those that were not quantised after all: wide, or as they are stored in modules that are `keeping` them.

        `is_mapped`: these may stay in the memory of their file, of which then nearly all is in use.
        """
        parameters: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for last, weight in module._parameters.items():
                if weight is None or (name := self._names.get(id(weight))) is None:
                    continue
                if id(weight) not in parameters:
                    tensor = self._tensors[name]
                    kept = tensor.kept(is_turned(module), is_mapped) if module in keeping else None
                    parameters[id(weight)] = _wide(tensor.read(), self._dtype) if kept is None else kept
                module._parameters[last] = parameters[id(weight)]


def _is_place(weight: Tensor) -> bool:
    """Whether nobody has written into it; what transformers has copied is looked at whole."""
    part = weight.detach() if any(weight.stride()) else weight.detach()[:1, :1]
    return bool(part.eq(1).all())


def _wide(stored: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(stored.to(dtype, copy=True))
