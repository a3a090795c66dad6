"""Modules and weights that our own code may stand in for: exactly what torch or transformers made, with nothing added.

A replaced `forward`, a hook, a subclass or a tensor that is more than memory means that somebody wants something else
to happen. Whatever these functions name goes to the modules themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from forerun.errors import UnsupportedModel
from forerun.kernels.cpu import narrow
from forerun.kernels.cpu.narrow import NarrowWeight, is_narrow
from forerun.kernels.scaled import ScaledWeight

# transformers leaves these on a model once somebody has asked it for hidden states; they only collect, when asked to.
COLLECTORS = "transformers.utils.output_capturing"
COMPILED_FROM = "_torchdynamo_orig_callable"  # what `torch.compile` leaves on a function: the one that it was given


def why_not_module(module: Any, kind: type[nn.Module]) -> str | None:
    """What makes `module` anything but an untouched `kind`, in words that follow its name; None where nothing does."""
    if type(module) is not kind:
        return f"is a {type(module).__name__}, not a {kind.__name__}"
    return why_not_forward(module)


def why_not_forward(module: nn.Module) -> str | None:
    """What happens besides when this module is called; None where it is its class's own forward alone."""
    if not runs_its_class(module):
        return "has a forward of its own"
    if is_compiled(module):
        return "is compiled"
    return "has forward hooks" if has_hooks(module) else None


def runs_its_class(module: nn.Module) -> bool:
    """Whether a module's forward is the one its class was written with, not one that was put in its place."""
    written = getattr(type(module).forward, "__module__", None)
    return "forward" not in module.__dict__ and written == type(module).__module__


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` has put something else in the place of a module's forward."""
    if type(module).__module__.startswith("torch._dynamo") or hasattr(module.__dict__.get("forward"), COMPILED_FROM):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def own_forward(module: nn.Module) -> Any:
    """The function that somebody has put in the place of a class's forward; None where that one runs in the end, be it
    compiled or within what accelerate does around it."""
    forward = module.__dict__.get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    forward = getattr(forward, COMPILED_FROM, forward)
    function = getattr(forward, "__func__", forward)
    return None if function is type(module).forward else function


def has_compiled(model: nn.Module) -> bool:
    """Whether something in a model is compiled: a forward that is replaced for a pass would be compiled as well."""
    return any(map(is_compiled, model.modules()))


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see what goes into a module or comes out of it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != COLLECTORS for hook in hooks)


def has_global_hooks() -> bool:
    """Whether hooks see every module there is."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def why_not_weight(weight: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str | None:
    """What makes `weight` anything but plain memory of this kind, in words that follow its name."""
    if (
        not is_narrow(weight) and type(weight) is not nn.Parameter
    ):  # quantised and distributed tensors look like float32 and lie elsewhere
        return f"is a {type(weight).__name__}, not a plain parameter"
    if tuple(weight.shape) != shape:
        return f"is of shape {tuple(weight.shape)}, not {shape}"
    if weight.dtype != dtype or weight.device != device:
        return f"is {weight.dtype} on {weight.device}, not {dtype} on {device}".replace("torch.", "")
    if not is_narrow(weight) and not is_memory(weight):
        return "does not lie in memory in one piece"
    return None


def is_memory(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor lie where its address says, one after the other."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes > 0  # freed by whoever shards it: no memory at all
    )


def is_turned_memory(weight: Any) -> bool:
    """Whether its transpose is; tensors of other classes may not know how to be transposed."""
    return type(weight) in (Tensor, nn.Parameter) and weight.ndim > 1 and is_memory(weight.mT)


def address(weight: Tensor) -> int:
    """Where the numbers of a weight lie, however they are stored; of a split one those of this process."""
    if isinstance(weight, ScaledWeight):
        return weight.raw.data_ptr()
    return narrow.address(weight) or own_part(weight).data_ptr()  # a DTensor says 0


def asks_address(weight: Tensor) -> Callable[[], int]:
    """`address` of one weight, for those who ask before every pass: its kind does not change, where it lies may."""
    if type(weight) is nn.Parameter:
        return weight.data_ptr
    if isinstance(weight, NarrowWeight | ScaledWeight):
        return partial(_address_of_raw, weight)  # which an assignment to `data` exchanges
    return partial(address, weight)


def _address_of_raw(weight: NarrowWeight | ScaledWeight) -> int:
    return weight.raw.data_ptr()


def own_part(weight: Tensor) -> Tensor:
    """What this process holds of a weight, without the import that asking for a DTensor takes."""
    part: Tensor = getattr(weight, "_local_tensor", weight)
    return part


def stored_bytes(weight: Tensor) -> int:
    """That a product with this weight reads."""
    return weight.num_bytes if isinstance(weight, ScaledWeight) else narrow.held(weight)[1]


def refuse_change(reason: str) -> NoReturn:
    """A call goes on with the model it began with, or not at all."""
    raise UnsupportedModel(
        f"the model was changed while a call was running: {reason}; let the call end first: the next one decodes with "
        "the model as it is then"
    )
