"""Is a model still the one that something was made from?

Bodies, recorded passes and kept keys are made from a model's modules and weights as they are at one moment. Users add
adapters, swap modules, load other weights, or move a model elsewhere, and nobody tells us. So the start of every call
compares the model with what it was: some tens of microseconds a layer, and nothing during the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig

from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.scaled import ScaledWeight
from forerun.models.offloaded import fetched, weights_map
from forerun.models.plain import COLLECTORS, address, is_memory, own_part

# Attributes of every module, read one by one or of no consequence for what a forward computes; and marks that
# transformers and we leave on a model.
_SKIPPED = frozenset(nn.Module().__dict__) | {
    "_is_hf_initialized", "_output_capturing_hooks_installed", "_forerun_configs", "generation_config",
}  # fmt: skip
_SETTINGS_SKIPPED = frozenset({"_attn_implementation_internal"})  # ours during a pass, nobody's within one
# Whose hooks come and go with calls and only listen: they are no change of a model.
_LISTENERS = frozenset({COLLECTORS, "forerun.speech.encoder_monitor"})
_CONTENTS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})


class Fingerprint:
    """A model's modules, parameters, hooks and settings: the same for as long as nothing but parameters' values has
    changed."""

    def __init__(self, model: nn.Module) -> None:
        self._objects, self._facts = _walk(model)
        self._glance = _Glance(self._objects)

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` is as it was."""
        if self._objects[0] is model and self._glance.finds_all():
            return True
        objects, facts = _walk(model)
        if not _same(objects, self._objects) or facts != self._facts:
            return False
        self._glance = _Glance(objects)  # something is another object now, of no consequence or equal to what it was
        return True


class _Glance:
    """Proves that everything still is the very object it was, in half the time that comparing takes.

    No proof is no verdict: a setting may have been replaced by an equal one.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._modules = [one for one in objects if isinstance(one, nn.Module)]
        self._types: list[type[nn.Module]] = list(map(type, self._modules))
        self._forwards = [(kind, kind.forward) for kind in set(self._types)]
        self._places = [(one, _place_and_version(one)) for one in objects if isinstance(one, Tensor)]
        names: list[dict[Any, Any]] = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        for module in self._modules:
            inside = module.__dict__
            names += (inside, *(inside[name] for name in _CONTENTS))
        settings = [module.__dict__[name] for module in self._modules for name in module.__dict__.keys() - _SKIPPED]
        containers = _containers(settings)
        names += (one for one in containers if isinstance(one, dict))
        self._empty = [one for one in names if not one]
        self._filled = [(one, tuple(one), tuple(one.values())) for one in names if one]
        self._lists = [(one, tuple(one)) for one in containers if not isinstance(one, dict)]

    def finds_all(self) -> bool:
        if any(self._empty) or list(map(type, self._modules)) != self._types:
            return False
        for kind, forward in self._forwards:
            if kind.forward is not forward:
                return False
        for one, names, values in self._filled:
            if tuple(one) != names or not all(map(is_, one.values(), values)):
                return False
        for tensor, place in self._places:
            if _place_and_version(tensor) != place:
                return False
        return all(_same(one, values) for one, values in self._lists)


def _containers(values: Iterable[Any]) -> list[Any]:
    """What holds settings within settings, each once: it is what it was while it holds the same objects."""
    containers: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, PreTrainedConfig):
            value = vars(value)
        if isinstance(value, list | tuple | set | frozenset | dict) and id(value) not in containers:
            containers[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    return list(containers.values())


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


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
        offloaded = weights_map(module)
        for tensors, place in ((inside["_parameters"], _place), (inside["_buffers"], _place_and_version)):
            for name, tensor in tensors.items():
                facts.append(name)
                if tensor is not None and tensor.is_meta and offloaded is not None:  # another one after each forward
                    objects.append(offloaded)
                    facts += (tensor.dtype, tensor.shape)
                elif tensor is not None:
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
            elif name in ("forward", "_compiled_call_impl"):
                facts.append(value)
            elif (fact := _fact(value)) is not None:
                facts += (name, fact)
    for config in configs.values():
        objects.append(config)
        facts += _settings(config)
    return objects, facts


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are and how they lie."""
    if isinstance(tensor, ScaledWeight | NarrowWeight):
        return address(tensor), tensor.dtype, tensor.device, tensor.shape
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        if (part := own_part(tensor)) is not tensor:
            return *_place(part), tensor.shape
        return tensor.dtype, tensor.device, tensor.shape  # what else there is to tell lies within, if anywhere
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _place_and_version(tensor: Tensor) -> tuple[Any, ...]:
    """The same of what is no parameter, and how often it was written to: tables of angles are made from its values."""
    return *_place(tensor), _version(tensor)


def _version(tensor: Tensor) -> int:
    try:
        return 0 if tensor.is_inference() else tensor._version
    except RuntimeError:  # a parameter made of an inference tensor, whose changes torch counts as little
        return 0


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

    Reads all weights once, as one step of plain decoding does; those that accelerate fetches from the disk, too.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    versions = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:  # nothing, or what is fetched below
            continue
        if is_memory(tensor) and not tensor.is_quantized:
            by_device.setdefault(tensor.device, []).append(_sum(tensor))
        else:  # whose numbers lie we do not know where: what torch has counted of its changes must do
            versions.append(_version(tensor))
    for tensor in fetched(model):
        if is_memory(tensor) and not tensor.is_quantized:
            by_device.setdefault(tensor.device, []).append(_sum(tensor))
    return [*versions, *(number for sums in by_device.values() for number in torch.stack(sums).tolist())]


def _sum(tensor: Tensor) -> Tensor:
    """One integer that depends on every bit and, roughly, on its place."""
    numbers = tensor.detach().flatten().view(torch.uint8)
    rows = numbers.view(len(tensor), -1) if tensor.ndim > 1 and len(numbers) else numbers[:, None]
    if rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0:
        rows = rows.view(torch.int64)
    sums = rows.sum(dim=-1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
