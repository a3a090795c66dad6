"""Weights that accelerate keeps on the CPU or the disk and fetches for each forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from forerun.errors import InvalidArgument


def is_offloaded(module: nn.Module) -> bool:
    """Whether some of the weights are fetched for each pass."""
    return any(weight.is_meta for weight in module.parameters())


def weights_map(module: nn.Module) -> Mapping[str, Tensor] | None:
    """What a module's own weights are fetched from, by name; None where they lie in the module."""
    hook: Any = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return next((one.weights_map for one in hooks if getattr(one, "offload", False)), None)


def refuse_offloaded_head(head: nn.Module) -> None:
    """Raise where a drafter would multiply with a head that is not there: a product with it is whatever memory held."""
    if is_offloaded(head):
        raise InvalidArgument(
            "the drafter multiplies with the target's head, which is offloaded to the CPU or the disk; load the target "
            "with a device_map that keeps its head where it is used, or use another drafter, such as PromptLookup()"
        )


def fetched(model: nn.Module) -> Iterator[Tensor]:
    """Those weights, one after the other, so that no more than one of them is held."""
    for module in model.modules():
        if (weights := weights_map(module)) is not None:
            tensors = {**module._parameters, **module._buffers}
            yield from (weights[name] for name, tensor in tensors.items() if tensor is not None and tensor.is_meta)
