"""Rotary frequencies that a GGUF file scales, which transformers' reader of such files leaves out.

Llama 3.1 and its successors carry a factor for every frequency (`rope_freqs.weight`), other models a kind of scaling in
their metadata. Read without it a model writes other text; so what a configuration can say is said there, and the rest
is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import UnsupportedModel
from forerun.loading.gguf import GgufFile

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
ONE_FOR_ALL = frozenset({"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"})  # families: all layers turn alike
FROM_CONFIG = frozenset({"gemma4"})  # whose configuration in transformers has the frequencies of the file
# What every Llama from 3.1 on has but for `factor`; llama.cpp's converter takes them where a model says nothing.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# A frequency's float32 rounding (6e-8) reaches its factor through a slope of about 4 * factor (32 in Llama 3.2).
TOLERANCE = 1e-4
REMEDY = "load the model's own folder or Hub name instead of its GGUF file"


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a file says beyond the base of its frequencies."""

    path: Path
    family: str
    kind: str = "linear"  # llama.cpp's word
    factor: float = 1.0
    factors: Tensor | None = None  # of each frequency
    unknown: tuple[str, ...] = ()  # that only llama.cpp makes sense of


def read_scaling(file: GgufFile) -> Scaling | None:
    """None where the frequencies are plain, or transformers knows those of the family."""
    family = str(file.need("general.architecture"))
    if family in FROM_CONFIG:
        return None
    prefix = f"{family}.rope.scaling."
    kind = str(file.metadata.get(f"{prefix}type", "linear"))
    factor = file.metadata.get(f"{prefix}factor") or file.metadata.get(f"{family}.rope.scale_linear") or 1.0
    if lost := [name for name in FACTORS if name in file.unread]:
        raise UnsupportedModel(
            f"{file.path} keeps {lost[0]!r}, which scales its rotary frequencies, in format {file.unread[lost[0]]}, "
            "which is not read here, and without it the text would be another model's; convert the file anew (F32)"
        )
    factors = {name: file.tensor(name) for name in FACTORS if name in file.records}
    factors = {name: tensor for name, tensor in factors.items() if not bool((tensor == 1).all())}
    unknown = (*_attention(file, prefix), *(name for name in factors if name != FACTORS[0]))
    if not factors and not unknown and (kind == "none" or (kind == "linear" and factor == 1)):
        return None
    return Scaling(file.path, family, kind, float(factor), factors.get(FACTORS[0]), unknown)


def _attention(file: GgufFile, prefix: str) -> Iterator[str]:
    if file.metadata.get(f"{prefix}attn_factor", 1.0) != 1.0:
        yield f"{prefix}attn_factor"


def scaled_config(config: Any, scaling: Scaling) -> Any:
    """A configuration, as transformers reads it from the file, with the scaling; refused where it cannot say it."""
    said = _parameters(config, scaling) if scaling.family in ONE_FOR_ALL and not scaling.unknown else None
    if said is None:
        what = ", ".join(scaling.unknown) or ("rope_freqs.weight" if scaling.factors is not None else scaling.kind)
        raise UnsupportedModel(
            f"{str(scaling.path)!r} scales the rotary frequencies of a {scaling.family!r} model in a way that its "
            f"configuration cannot say ({what}), and without it the text would be another model's; {REMEDY}"
        )
    config = copy.deepcopy(config)
    config.rope_parameters = config.rope_parameters | said
    return config


def _parameters(config: Any, scaling: Scaling) -> dict[str, Any] | None:
    """Entries of `rope_parameters`; None where there are none that make these frequencies."""
    if scaling.factors is None:
        return {"rope_type": "linear", "factor": scaling.factor} if scaling.kind == "linear" else None
    said = {"rope_type": "llama3", "factor": float(scaling.factors.max()), **LLAMA3}
    is_theirs = scaling.factor == 1 and scaling.kind in ("linear", "none")
    return said if is_theirs and _makes(config, said, scaling.factors) else None


def _makes(config: Any, said: dict[str, Any], factors: Tensor) -> bool:
    """Whether a configuration with these entries has frequencies that are smaller than plain ones by these factors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(config)
    config.rope_parameters = config.rope_parameters | said
    frequencies, attention = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** steps
    if factors.shape != frequencies.shape or attention != 1:
        return False
    return torch.allclose(plain / frequencies, factors, rtol=TOLERANCE, atol=0)
