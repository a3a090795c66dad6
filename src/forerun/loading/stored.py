"""Weights that stay in memory as their file stores them, for float32 arithmetic on a CPU.

Decoding reads every weight once for a few tokens, so a byte saved is time saved. Half-precision numbers and GGUF
blocks are widened in registers; results are those of a float32 copy, bit for bit in the same kernels. What fused layers
multiply is kept (`models.bodies.matrices`), embedding and head; norms, biases and all else become float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.config import Kernels
from forerun.config import kernels as kernels_asked
from forerun.errors import ForerunError
from forerun.kernels import why_not_numba
from forerun.kernels.cpu.narrow import NarrowWeight, narrow_parameter
from forerun.loading.gguf import read_gguf
from forerun.loading.llama import is_llama, llama_blocks
from forerun.loading.sizes import stored_types
from forerun.math.blocks import BlockFormat, format_named

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def can_keep(device: torch.device) -> bool:
    """Whether there are products for narrow weights here, and nobody has switched them off."""
    return device.type == "cpu" and kernels_asked(None) is not Kernels.OFF and why_not_numba() is None


def half_dtype(folder: Path, config: Any) -> torch.dtype | None:
    """The type that all weights of a model folder are stored in and may stay in; None where they are not all halves.

    A checkpoint of mixed types is loaded in float32: rounding its wider weights would change the model.
    """
    kinds = stored_types(folder, config)
    if len(kinds) != 1:
        return None
    from forerun.models.bodies.matrices import may_be_fused

    (kind,) = kinds
    return _HALVES[kind] if kind in _HALVES and may_be_fused(config) and _pays(format_named(kind)) else None


def keep_halves(model: nn.Module, half: torch.dtype) -> None:
    """Of a float32 model whose weights were stored in `half`: store so again what fused layers multiply.

    A weight of other values, which was computed and not stored, stays as it is.
    """
    from forerun.models.bodies.matrices import is_turned, matrices

    owners = list(model.modules())
    for module in matrices(model) or ():
        weight = module._parameters["weight"]
        if weight is None or isinstance(weight, NarrowWeight):
            continue
        stored = weight.detach().to(half)
        if torch.equal(stored.float(), weight) and (narrow := kept_half(stored, is_turned(module))) is not None:
            _exchange(owners, {id(weight): narrow})  # at once: what it takes the place of need not wait for the others


def kept_half(stored: Tensor, is_turned: bool) -> nn.Parameter | None:
    """A matrix of halves as a float32 parameter; None where they cannot be multiplied as they are."""
    by_outputs = stored.T if is_turned else stored
    if not _fits(by_outputs.shape[1]):
        return None
    kind = next(kind for kind, dtype in _HALVES.items() if dtype == stored.dtype)
    return narrow_parameter(by_outputs.contiguous().view(torch.uint8), format_named(kind), is_turned)


def _exchange(owners: Iterable[nn.Module], replacements: Mapping[int, nn.Parameter]) -> None:
    """Put parameters in the places of others, by their ids, wherever these are held."""
    for owner in owners:
        for name, weight in owner._parameters.items():
            if weight is not None and id(weight) in replacements:
                owner._parameters[name] = replacements[id(weight)]


def keep_blocks(model: nn.Module, path: Path, is_ours: bool) -> None:
    """Of a float32 model that came from a GGUF file: keep the file's blocks instead of the matrices they decode to.

    Where the model was made from the file by another reader (`is_ours` is false), a matrix that differs from what its
    blocks decode to stays as it is.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kept: dict[int, nn.Parameter] = {}
    for name, raw, stored in _blocks(path):
        module, _, last = name.rpartition(".")
        if module not in modules or not is_matrix(modules[module]) or last != "weight":
            continue
        weight = modules[module]._parameters[last]
        assert weight is not None
        is_whole = raw.shape[1] // stored.size * stored.values == weight.shape[1]
        if not is_whole or not can_keep_blocks(stored, weight.shape[1]):
            continue
        narrow = narrow_parameter(raw.clone(), stored)  # the file may be replaced while we run
        if is_ours or torch.equal(stored.decode(raw.flatten()).view(weight.shape), weight):
            kept[id(weight)] = narrow
    _exchange(modules.values(), kept)


def _blocks(path: Path) -> Iterable[tuple[str, Tensor, BlockFormat]]:
    """None where the file holds what our reader does not know: the model stays as it is."""
    try:
        return list(_narrow_ones(path))
    except ForerunError:
        return []


def widened_formats(path: Path) -> dict[str, int]:
    """How many tensors of a GGUF file are in formats that no product of ours reads, and are float32 in memory."""
    from gguf import GGMLQuantizationType

    try:
        unread = read_gguf(path, skips_unknown=True).unread
    except ForerunError:  # transformers has read it
        return {}
    return dict(Counter(GGMLQuantizationType(kind).name for kind in unread.values()))


def _narrow_ones(path: Path) -> Iterator[tuple[str, Tensor, BlockFormat]]:
    file = read_gguf(path, skips_unknown=True)
    if is_llama(file):
        yield from llama_blocks(file)


def is_matrix(module: nn.Module) -> bool:
    """Whether its weight may be blocks."""
    return type(module) in (nn.Linear, nn.Embedding)


def can_keep_blocks(stored: BlockFormat, size: int) -> bool:
    """Whether rows of this size are multiplied as they are stored, and in less time than in float32."""
    return stored.name != "F32" and _fits(size) and _pays(stored)


def _fits(size: int) -> bool:
    from forerun.kernels.cpu.widen import WIDEST

    return size % WIDEST == 0


def _pays(stored: BlockFormat) -> bool:
    from forerun.kernels.cpu.choice import narrow_pays

    return narrow_pays(stored)
