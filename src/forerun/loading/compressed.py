"""Rounded weights on disk, in the format of compressed-tensors, which others read and write as well.

Four layouts are known: weights of 8 and 4 bits packed into int32 (`pack-quantized`), plain int8 (`int-quantized`) and
8-bit floats (`float-quantized`), each with a scale for every output or group. They are read as they are, without the
library; every other layout is left to transformers, which needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.errors import InvalidArgument
from forerun.files import replace_files
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.tensor_files import CONFIG, WHOLE, model_tensors, read_tensor
from forerun.math.scaled import FP8, GROUPS, INT4, INT8, W8A8, Scheme, packed, unpacked

METHOD = "compressed-tensors"
FORMATS = {"int8": "pack-quantized", "int4": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}
KEYS = ("weight_packed", "weight_shape", "weight_scale")
# What a configuration may say, by place. Anything else with a value may be a step of the model's arithmetic, such as
# rotations around its products (`transform_config`).
SAYS = frozenset({
    "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "version", "sparsity_config",
})  # fmt: skip
GROUP_SAYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
ROUNDING_SAYS = frozenset({
    "num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "actorder",
    "observer", "observer_kwargs",  # how the scales were found
    "zp_dtype",  # of zero points, which symmetric numbers have none of
})  # fmt: skip
DENSE = "dense"  # the format of `sparsity_config` in which nothing is left out


def save_rounded(model: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a model whose linear layers were rounded on load: weights, scales and configuration.

    `forerun.load(folder)` wants a tokenizer beside them, which is written where it is given. Other files stay.
    """
    if kept := sorted({weight.format.name for weight in model.parameters() if isinstance(weight, NarrowWeight)}):
        raise InvalidArgument(
            f"the model's weights are kept for a CPU ({', '.join(kept)}), in no layout of {METHOD}; load it with "
            "quantize= on a GPU, or with dtype='float32' and use its save_pretrained"
        )
    schemes = {weight.scheme for weight in model.parameters() if isinstance(weight, ScaledWeight)}
    if len(schemes) != 1:
        raise InvalidArgument(
            f"the model has {len(schemes)} kinds of rounded weights; load it with quantize= and one scheme"
        )
    (scheme,) = schemes
    tensors = dict(_tensors(model))
    contents = model.config.to_dict() | {"quantization_config": _described(model, scheme)}
    text = json.dumps(contents, indent=2, sort_keys=True, default=str) + "\n"

    def write(beside: Path) -> None:
        save_file(tensors, beside / WHOLE, metadata={"format": "pt"})
        (beside / CONFIG).write_text(text, encoding="utf-8")
        model.generation_config.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)

    replace_files(Path(folder), write, last=CONFIG)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything that has to be stored, once: a head that is the embedding is left out."""
    names = {name for name, _ in model.named_parameters()}
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    for name, tensor in model.state_dict().items():
        if name in shared:
            continue
        if isinstance(tensor, ScaledWeight):
            prefix = name.removesuffix("weight")
            yield from ((prefix + key, part.cpu().contiguous()) for key, part in _stored(tensor).items())
        else:
            yield name, tensor.cpu().contiguous()


def _stored(weight: ScaledWeight) -> dict[str, Tensor]:
    """A weight by the names that its layout has."""
    scheme, values = weight.scheme, weight.raw
    if scheme.rounds_rows:
        return {"weight": values, "weight_scale": weight.scales}
    if scheme.is_packed:
        words = _words(unpacked(values, scheme.group), 4)
    else:
        words = _words(values.view(torch.uint8) ^ 128, 8)
    return {"weight_packed": words, "weight_shape": torch.tensor(weight.shape), "weight_scale": weight.scales}


def _words(numbers: Tensor, bits: int) -> Tensor:
    """[N, K] unsigned -> int32 [N, K * bits / 32, rounded up], the first number in the lowest bits."""
    each = 32 // bits
    padded = nn.functional.pad(numbers, (0, -numbers.shape[1] % each)).unflatten(1, (-1, each)).long()
    words = (padded << torch.arange(0, 32, bits, device=numbers.device)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _numbers(words: Tensor, bits: int, size: int) -> Tensor:
    """The other way round: [N, size] uint8."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return ((words.long().unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :size].to(torch.uint8)


def _described(model: Any, scheme: Scheme) -> dict[str, Any]:
    """What compressed-tensors' configuration says of a scheme."""
    is_float = scheme.values.is_floating_point
    kind = {"num_bits": 4 if scheme.is_packed else 8, "type": "float" if is_float else "int", "symmetric": True}
    weights = kind | {"dynamic": False, "strategy": "group" if scheme.group else "channel"}
    weights |= {"group_size": scheme.group} if scheme.group else {}
    rows = kind | {"dynamic": True, "strategy": "token"} if scheme.rounds_rows else None
    rounded = {
        name for name, module in model.named_modules() if isinstance(module._parameters.get("weight"), ScaledWeight)
    }
    return {
        "quant_method": METHOD,
        "format": FORMATS[scheme.name],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None,
                "format": FORMATS[scheme.name],
            }
        },
        "ignore": [n for n, m in model.named_modules() if type(m) is nn.Linear and n not in rounded],
        "kv_cache_scheme": None,
    }  # fmt: skip


def scheme_of(config: Any) -> Scheme | None:
    """How the weights of a stored model are rounded; None where it is in no layout that is known here."""
    stated = getattr(config, "quantization_config", None)
    says: dict[str, Any] = stated if isinstance(stated, dict) else {} if stated is None else stated.to_dict()
    groups = list((says.get("config_groups") or {}).values())
    if says.get("quant_method") != METHOD or says.get("kv_cache_scheme") or len(groups) != 1:
        return None
    group = groups[0]
    weights, rows = group.get("weights") or {}, group.get("input_activations")
    said = ((says, SAYS), (group, GROUP_SAYS), (weights, ROUNDING_SAYS), (rows or {}, ROUNDING_SAYS))
    if any(value for part, may_say in said for key, value in part.items() if key not in may_say):
        return None
    if (sparsity := says.get("sparsity_config")) and sparsity.get("format") != DENSE:
        return None
    is_plain = not (weights.get("dynamic") or weights.get("actorder") or group.get("output_activations"))
    if list(group.get("targets") or ()) != ["Linear"] or not weights.get("symmetric") or not is_plain:
        return None
    if rows is not None and not (
        rows.get("dynamic") is True and rows.get("strategy") == "token" and rows.get("symmetric")
    ):
        return None
    kind = weights.get("num_bits"), weights.get("type"), weights.get("strategy"), rows is not None
    if rows is not None and (rows.get("num_bits"), rows.get("type")) != kind[:2]:
        return None
    known: dict[tuple[Any, ...], Scheme] = {
        (8, "int", "channel", False): INT8, (8, "int", "channel", True): W8A8, (8, "float", "channel", True): FP8,
        (4, "int", "group", False): INT4,
    }  # fmt: skip
    scheme = known.get(kind)
    if scheme is INT4:
        size = weights.get("group_size")
        scheme = replace(INT4, group=size) if size in GROUPS else None
    return scheme if scheme is not None and says.get("format") == FORMATS[scheme.name] else None


class RoundedFolder:
    """A folder in one of these layouts: its plain tensors, and its rounded weights by module."""

    def __init__(self, place: Path, files: dict[str, Path], scheme: Scheme) -> None:
        self.place, self._files, self.scheme = place, files, scheme
        self.modules = sorted(n.removesuffix(".weight_scale") for n in self._files if n.endswith(".weight_scale"))

    @classmethod
    def of(cls, folder: Path, sketch: Any, scheme: Scheme) -> RoundedFolder | None:
        """For a model built on the meta device; None where transformers makes it of other files, or makes more of a
        rounded weight than that of a linear layer of the same name: experts that are stored one by one, say."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        files = model_tensors(folder, sketch.config)
        if files is None:
            return None
        weights, modules = cls(folder, files, scheme), dict(sketch.named_modules())
        changes = get_model_conversion_mapping(sketch, add_legacy=False)
        for name in weights.modules:
            is_changed = any(change.rename_source_key(f"{name}.weight")[1] is not None for change in changes)
            if is_changed or type(modules.get(name)) is not nn.Linear:
                return None
        return weights

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A state for transformers, in which a rounded weight is one number seen many times: its place, no memory."""
        replaced = {f"{module}.{key}" for module in self.modules for key in (*KEYS, "weight")}
        plain = {name: self._read(name) for name in self._files if name not in replaced}
        return plain | {
            f"{module}.weight": torch.zeros(1, dtype=dtype).expand(self._shape(module)) for module in self.modules
        }

    def fill(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Give the model its rounded weights, one at a time, where they will run."""
        modules = dict(model.named_modules())
        for name in self.modules:
            weight = self._weight(name, dtype, device)
            modules[name]._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def _weight(self, module: str, dtype: torch.dtype, device: torch.device) -> ScaledWeight:
        scales = self._read(f"{module}.weight_scale").to(device)
        scheme, shape = self.scheme, self._shape(module)
        if scheme.rounds_rows:
            values = self._read(f"{module}.weight").to(device)
        else:
            bits = 4 if scheme.is_packed else 8
            numbers = _numbers(self._read(f"{module}.weight_packed").to(device), bits, shape[1])
            values = packed(numbers, scheme.group) if scheme.is_packed else (numbers ^ 128).view(torch.int8)
        return ScaledWeight(values, scales, scheme, dtype)

    def _shape(self, module: str) -> tuple[int, ...]:
        if f"{module}.weight_shape" in self._files:
            return tuple(self._read(f"{module}.weight_shape").tolist())
        return tuple(self._read(f"{module}.weight").shape)

    def _read(self, name: str) -> Tensor:
        return read_tensor(self._files[name], name)
