"""Quantise a model's weights while it is loaded on a CPU, one matrix at a time: `load(..., quantize="int8")`.

"int8" and "int4" round weights alone, in groups of 32 values; activations stay float32. With "w8a8" linear layers
multiply integers: one scale an output for weights, one a token for what they are multiplied with; with "w8a8-g32" one
for 32 numbers of a token, and a matrix whose outputs are no multiple of 16 has float32 activations. Embedding and head
keep eight bits and float32 activations under the other schemes, because every logit hangs on them, unless something
else is asked for; groups of 32 do no harm there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ForerunWarning, InvalidArgument
from forerun.kernels import why_not_numba
from forerun.kernels.cpu.narrow import NarrowWeight, narrow_parameter
from forerun.loading import rounding
from forerun.loading.routers import routers
from forerun.math.blocks import BlockFormat, format_named
from forerun.math.integer import encode_rows, row_format
from forerun.math.panels import PANEL, encode_panels, panel_format
from forerun.math.quantise import GROUP, encode_q4_1, encode_q8_0

RowsOf = Callable[[Tensor, bool], Iterator[Tensor]]  # of a weight; whether it is [inputs, outputs]
AT_ONCE = 1 << 21  # numbers of a weight that are float32 at a time
MOST_LEFT = 0.25  # of a model's weights that may stay as they are without a word
EIGHT_BITS, INTEGERS, INTEGER_GROUPS, FOUR_BITS = "int8", "w8a8", "w8a8-g32", "int4"
SCHEMES = (EIGHT_BITS, INTEGERS, INTEGER_GROUPS, FOUR_BITS)
_ENCODERS: dict[str, tuple[Callable[[int], BlockFormat], Callable[[Tensor], Tensor]]] = {
    EIGHT_BITS: (lambda size: format_named("Q8_0"), encode_q8_0),
    INTEGERS: (row_format, encode_rows),
    INTEGER_GROUPS: (panel_format, encode_panels),
    FOUR_BITS: (lambda size: format_named("Q4_1"), encode_q4_1),
}


def check_scheme(scheme: str | None, device: torch.device, dtype: torch.dtype, asked: str | None = None) -> None:
    """Raise where weights cannot be quantised like this here; `asked` is what the user wrote."""
    if scheme is None:
        return
    asked = asked or f"quantize={scheme!r}"
    if device.type == "cuda":
        if reason := rounding.why_not(scheme, device):
            raise InvalidArgument(f"{asked}: {reason}")
        return
    if scheme not in SCHEMES:
        where = "for a GPU; on a CPU" if rounding.why_not(scheme, device) is None else "unknown;"
        raise InvalidArgument(f"{asked} is {where} there are {', '.join(map(repr, SCHEMES))}")
    if device.type != "cpu":
        raise InvalidArgument(f"{asked} is for a CPU or a CUDA GPU, not for {device.type!r}; leave it out")
    if dtype != torch.float32:
        raise InvalidArgument(f"{asked} computes in float32, not in {dtype}; leave the dtype out")
    if reason := why_not_numba():
        raise InvalidArgument(f"{asked} needs compiled products: {reason}")


@torch.no_grad()
def quantise(
    model: Any,
    scheme: str,
    name: str,
    without: nn.Module | None = None,
    asked: str | None = None,
    with_head: bool | None = None,
    rows_of: RowsOf | None = None,
) -> None:
    """Exchange the matrices of a model for quantised ones; some rows of one are float32 at a time.

    The part `without` stays as it is. Embedding and head are rounded like the layers `with_head`, stay as they are
    where that is False, and have what their scheme says where nothing is asked. `rows_of` reads the outputs of a weight
    that the model does not hold itself.
    """
    asked = asked or f"quantize={scheme!r}"
    ends = {id(getattr(end, "weight", None)) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    exchanged: dict[int, nn.Parameter] = {}
    held = []  # ids stay taken until all weights have been exchanged
    for module, weight in _holders(model, without):
        if with_head is False and id(weight) in ends:
            continue
        if id(weight) not in exchanged:
            _refuse_blocks(weight, asked, name)
            held.append(weight)
            is_eight = with_head is None and scheme != INTEGER_GROUPS and id(weight) in ends
            exchanged[id(weight)] = _quantised(
                weight, _is_turned(module), EIGHT_BITS if is_eight else scheme, asked, rows_of or own_rows
            )
        module._parameters["weight"] = exchanged[id(weight)]
    if not exchanged:
        raise InvalidArgument(f"{asked}: no linear layer of {name!r} has a multiple of {GROUP} inputs; leave it out")
    if without is None:
        _tell_of_the_rest(model, asked, name, ends if with_head is False else set())


def _tell_of_the_rest(model: nn.Module, asked: str, name: str, chosen: set[int]) -> None:
    """Experts hold their weights in another way: a model of little else hardly changes."""
    left: Counter[str] = Counter()
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is None or id(weight) in chosen:
                continue
            if weight.ndim > 1 and not isinstance(weight, NarrowWeight):
                left[type(module).__name__] += weight.numel()
    share = left.total() / sum(weight.numel() for weight in model.parameters())
    if share > MOST_LEFT:
        what = f"{share:.0%} of the weights of {name!r} stay as they are, those of {', '.join(left)}"
        warnings.warn(f"{asked}: {what}; only linear layers and embeddings are quantised", ForerunWarning, stacklevel=2)


def format_of(scheme: str, size: int) -> BlockFormat:
    """How a matrix with so many inputs is stored."""
    return _ENCODERS[scheme][0](size)


def matrices(model: nn.Module, without: nn.Module | None = None) -> list[Tensor]:
    """The weights that are quantised, each once."""
    return list({id(weight): weight for _, weight in _holders(model, without)}.values())


def _holders(model: nn.Module, without: nn.Module | None) -> list[tuple[nn.Module, Tensor]]:
    """Of a model that fused layers run, what those multiply; of others all that torch's own layers hold."""
    from forerun.models.bodies.matrices import matrices as multiplied

    modules = multiplied(model)
    if modules is None:
        modules = [module for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)]
    left_out = routers(model) | (set() if without is None else set(without.modules()))
    held = [(module, module._parameters.get("weight")) for module in modules if module not in left_out]
    return [
        (module, weight)
        for module, weight in held
        if weight is not None and weight.shape[0 if _is_turned(module) else 1] % GROUP == 0
    ]


def _is_turned(module: nn.Module) -> bool:
    from forerun.models.bodies.matrices import is_turned

    return is_turned(module)


def rows_at_once(size: int) -> int:
    """Rows of so many inputs that are float32 at a time: whole panels."""
    return max(1, AT_ONCE // size // PANEL) * PANEL


def own_rows(weight: Tensor, is_turned: bool) -> Iterator[Tensor]:
    """The rows of a weight, some at a time; of one that is [inputs, outputs] the columns."""
    if isinstance(weight, NarrowWeight):
        size = weight.shape[0 if is_turned else 1]
        for some in weight.raw.split(rows_at_once(size)):
            yield weight.format.decode(some.reshape(-1)).view(-1, size)
    else:
        by_outputs = weight.detach().T if is_turned else weight.detach()
        yield from by_outputs.split(rows_at_once(by_outputs.shape[1]))


def _quantised(weight: Tensor, is_turned: bool, scheme: str, asked: str, rows_of: RowsOf) -> nn.Parameter:
    count, size = weight.shape[::-1] if is_turned else weight.shape
    is_odd = scheme == INTEGER_GROUPS and count % PANEL
    format_for, encode = _ENCODERS[EIGHT_BITS if is_odd else scheme]
    stored, done = format_for(size), 0
    raw = torch.empty(count, size // stored.values * stored.size, dtype=torch.uint8)
    for some in rows_of(weight, is_turned):
        dense = some.float().contiguous()
        if not dense.isfinite().all():
            raise InvalidArgument(f"{asked}: a weight is infinite or not a number; check the model's files")
        raw[done : done + len(dense)] = encode(dense)
        done += len(dense)
    assert done == len(raw)
    return narrow_parameter(raw, stored, is_turned)


def _refuse_blocks(weight: Tensor, asked: str, name: str) -> None:
    """Rounding what was rounded before makes it worse, and here no smaller."""
    if isinstance(weight, NarrowWeight) and _has_blocks(weight.format):
        raise InvalidArgument(
            f"{asked}: {name!r} is stored in {weight.format.name} already and stays so in memory; leave "
            "it out, or add dtype='float32' to quantise its float32 copy"
        )


def _has_blocks(stored: BlockFormat) -> bool:
    return stored.values > 1
