"""Is a model still the one that something was made from?

Bodies, recorded passes and kept keys are made from a model's modules and weights as they are at one moment. Users add
adapters, swap modules, load other weights, or move a model elsewhere, and nobody tells us. So the start of every call
compares the model with what it was: about a millisecond for thirty layers, and nothing during the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig

from forerun.models.plain import COLLECTORS, is_memory

# Attributes of every module, read one by one or of no consequence for what a forward computes; and marks that
# transformers and we leave on a model.
_SKIPPED = frozenset(nn.Module().__dict__) | {
    "_is_hf_initialized", "_output_capturing_hooks_installed", "_forerun_configs", "generation_config",
}  # fmt: skip
_SETTINGS_SKIPPED = frozenset({"_attn_implementation_internal"})  # ours during a pass, nobody's within one
# Whose hooks come and go with calls and only listen: they are no change of a model.
_LISTENERS = frozenset({COLLECTORS, "forerun.speech.encoder_monitor"})
_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})


@dataclass(frozen=True)
class Fingerprint:
    """A model's modules, parameters, hooks and settings: equal for as long as nothing but parameters' values has
    changed."""

    objects: tuple[weakref.ref[Any], ...]  # modules, parameters, buffers: told by identity, and not kept alive
    facts: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        objects, facts = _walk(model)
        return cls(tuple(map(weakref.ref, objects)), tuple(facts))

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` is as it was."""
        objects, facts = _walk(model)
        if len(objects) != len(self.objects) or tuple(facts) != self.facts:
            return False
        return all(known() is now for known, now in zip(self.objects, objects, strict=True))


def _walk(model: nn.Module) -> tuple[list[Any], list[Any]]:
    objects: list[Any] = []
    facts: list[Any] = [tuple(torch_module._global_forward_hooks), tuple(torch_module._global_forward_pre_hooks)]
    configs: dict[int, PreTrainedConfig] = {}
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        objects.append(module)
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind, inside = type(module), module.__dict__
        facts += (kind, kind.forward, *inside["_modules"])
        waiting += (child for child in inside["_modules"].values() if child is not None)
        for tensors, place in ((inside["_parameters"], _place), (inside["_buffers"], _place_and_version)):
            for name, tensor in tensors.items():
                facts.append(name)
                if tensor is not None:
                    objects.append(tensor)
                    facts.append(place(tensor))
        for hooks in (inside["_forward_hooks"], inside["_forward_pre_hooks"]):
            if hooks:  # each has a number that no other ever had
                facts += (("hook", n) for n, h in hooks.items() if getattr(h, "__module__", None) not in _LISTENERS)
        for name in sorted(inside.keys() - _SKIPPED):
            value = inside[name]
            if isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif isinstance(value, Tensor):
                objects.append(value)
                facts.append(_place_and_version(value))
            elif name == "forward":
                facts.append(value)
            elif (fact := _fact(value)) is not None:
                facts += (name, fact)
    for config in configs.values():
        objects.append(config)
        facts += _settings(config)
    return objects, facts


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are and how they lie."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return tensor.dtype, tensor.device, tensor.shape  # what else there is to tell lies within, if anywhere
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape


def _place_and_version(tensor: Tensor) -> tuple[Any, ...]:
    """The same of what is no parameter, and how often it was written to: tables of angles are made from its values."""
    return *_place(tensor), _version(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # torch counts none of the others' changes


def _fact(value: Any) -> Any:
    """A module's setting as something that can be compared later; None where it is none."""
    if type(value) in _PLAIN:
        return value, type(value)  # 1 and True are equal
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return repr(value) if all(_fact(part) is not None for part in parts) else None
    return None


def _settings(config: PreTrainedConfig) -> Iterator[Any]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _settings(value)
        elif name not in _SETTINGS_SKIPPED and (fact := _fact(value)) is not None:
            yield name, fact


@torch.inference_mode()
def checksum(model: nn.Module) -> list[int]:
    """Changes with the values of weights, however they were written: `weight.data` leaves no trace on the weight.

    Reads all weights once, as one step of plain decoding does.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    versions = []
    for tensor in (*model.parameters(), *model.buffers()):
        if is_memory(tensor) and not tensor.is_quantized and tensor.device.type != "meta":
            by_device.setdefault(tensor.device, []).append(_sum(tensor))
        else:  # whose numbers lie we do not know where: what torch has counted of its changes must do
            versions.append(_version(tensor))
    return [*versions, *(number for sums in by_device.values() for number in torch.stack(sums).tolist())]


def _sum(tensor: Tensor) -> Tensor:
    """One integer that depends on every bit and, roughly, on its place."""
    numbers = tensor.detach().flatten().view(torch.uint8)
    rows = numbers.view(len(tensor), -1) if tensor.ndim > 1 and len(numbers) else numbers[:, None]
    if rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0:
        rows = rows.view(torch.int64)
    sums = rows.sum(dim=-1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
