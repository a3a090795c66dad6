"""A float32 weight that stays in memory as narrow as it was stored, as a tensor that modules can hold.

A `NarrowWeight` is the parameter of an ordinary `nn.Linear` or `nn.Embedding`. Products and look-ups read the stored
bytes and widen them in registers; anything else torch is asked to do works on a float32 copy made for the moment. So
modules, adapters, `model.generate` and checks of ours see the weight they know, with the values its float32 copy has.
Integers (`math.integer`, `math.panels`) are the exception: a linear layer multiplies integers with them, for any number
of inputs. It cannot be written: an operation that would change it is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.math import integer, panels
from forerun.math.blocks import BlockFormat

FEW_ROWS = 64  # inputs up to which the stored bytes are multiplied; for more, widening them once costs little beside
REMEDY = "load the model with dtype='float32' to have plain parameters"
_TRAINING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_PRODUCTS = (torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class NarrowWeight(Tensor):
    """[N, K] float32 values, stored row by row in the blocks of `format`.

    One that `is_turned` is seen as [K, N], as GPT-2's layers see their weights; its bytes lie by outputs all the same.
    """

    raw: Tensor  # [N, bytes of a row] uint8
    format: BlockFormat
    is_turned: bool

    @staticmethod
    def __new__(cls, raw: Tensor, format: BlockFormat, is_turned: bool = False) -> NarrowWeight:
        shape = raw.shape[0], raw.shape[1] // format.size * format.values
        shape = shape[::-1] if is_turned else shape
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=raw.device)

    def __init__(self, raw: Tensor, format: BlockFormat, is_turned: bool = False) -> None:
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and raw.shape[1] % format.size == 0
        self.raw, self.format, self.is_turned = raw, format, is_turned

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NarrowWeight({self.format.name}, shape={tuple(self.shape)})"

    @property
    def multiplies_integers(self) -> bool:
        """Whether what it is multiplied with is rounded as well."""
        return self.format.name in (integer.NAME, panels.NAME)

    def dense(self, room: Tensor | None = None) -> Tensor:
        """The float32 copy, which may be made in `room`: float32 memory for at least as many numbers."""
        if self.is_turned:
            return self.turned().dense(room).T
        if self.multiplies_integers or not _can_widen(self):
            return self.format.decode(self.raw.reshape(-1)).view(self.shape)
        if room is None:
            room = torch.empty(self.shape.numel(), dtype=torch.float32, device=self.raw.device)
        dense = room[: self.shape.numel()].view(self.shape)
        _widen(self, dense)
        return dense

    def turned(self) -> NarrowWeight:
        """The same memory seen the other way round."""
        return NarrowWeight(self.raw, self.format, not self.is_turned)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding and isinstance(weight := args[1] if len(args) > 1 else kwargs["weight"], NarrowWeight):
            return _embedding(args[0] if args else kwargs["input"], weight)
        if func == Tensor.T.__get__:  # type: ignore[attr-defined]
            return args[0].turned()
        if func in _PRODUCTS and not kwargs and (product := _turned_product(*args)) is not None:
            return product
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(*args)
        if func == Tensor.__setitem__:
            raise InvalidArgument(f"weights that are kept narrow cannot be changed in place; {REMEDY}")
        if func is Tensor.storage:  # what `save_pretrained` comes to ask of every weight
            raise InvalidArgument(f"weights that are kept narrow have no float32 memory to write to a file; {REMEDY}")
        if func in _TRAINING and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
            raise InvalidArgument(f"weights that are kept narrow cannot be trained; {REMEDY}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _KEPT:
            return NarrowWeight(args[0].raw, args[0].format, args[0].is_turned)
        if func is torch.ops.aten.clone.default:
            return NarrowWeight(args[0].raw.clone(), args[0].format, args[0].is_turned)
        if func._schema.is_mutable and isinstance(args[0], NarrowWeight):
            raise InvalidArgument(f"weights that are kept narrow cannot be changed in place; {REMEDY}")
        args, kwargs = tree_map_only(NarrowWeight, NarrowWeight.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def narrow_parameter(raw: Tensor, format: BlockFormat, is_turned: bool = False) -> nn.Parameter:
    """For a module, in place of the parameter it has."""
    return nn.Parameter(NarrowWeight(raw, format, is_turned), requires_grad=False)


def _turned_product(*args: Any) -> Tensor | None:
    """`x @ weight` or `addmm(bias, x, weight)` of a turned weight, as linear layers multiply; None for all others."""
    *biases, x, weight = args
    if not isinstance(weight, NarrowWeight) or not weight.is_turned or isinstance(x, NarrowWeight) or x.ndim < 2:
        return None
    return _linear(x, weight.turned(), *biases)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, NarrowWeight) or weight.is_turned or type(x) is NarrowWeight:
        return F.linear(*tree_map_only(NarrowWeight, NarrowWeight.dense, (x, weight, bias)))
    if x.shape[-1] != weight.shape[1]:
        return F.linear(x, weight.dense(), bias)  # torch says what is wrong
    follows = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if weight.multiplies_integers:
        if x.dtype != torch.float32:
            raise InvalidArgument(f"products of integers take float32, not {x.dtype}; {REMEDY}")
        if not follows:
            return _product(x, weight, bias)
        product: Tensor = _StraightThrough.apply(x, bias, (weight,))  # type: ignore[no-untyped-call]
        return product
    if follows or x.dtype != torch.float32 or x.shape[:-1].numel() > FEW_ROWS:
        return F.linear(x, weight.dense(), bias)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    from forerun.kernels.cpu.linear import linear_at
    from forerun.kernels.cpu.threads import most_threads

    return linear_at(x, (address(weight), product_of(weight)), weight.shape[0], bias, most_threads())


def _can_widen(weight: NarrowWeight) -> bool:
    from forerun.kernels.cpu.dense import can_widen
    from forerun.kernels.cpu.widen import number_of

    return weight.raw.device.type == "cpu" and can_widen(number_of(weight.format.name), weight.shape[1])


def _widen(weight: NarrowWeight, out: Tensor) -> None:
    from forerun.kernels.cpu.dense import widen
    from forerun.kernels.cpu.threads import most_threads
    from forerun.kernels.cpu.widen import number_of

    rows, size = weight.shape
    widen(number_of(weight.format.name), address(weight), out.data_ptr(), rows, size, most_threads())


class _StraightThrough(torch.autograd.Function):
    """A product of integers whose gradients are those of the product with the weight's values, as if none were rounded.

    Rounding itself has no gradient but zero.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor | None, weights: tuple[NarrowWeight]) -> Tensor:
        context.weight = weights[0]
        return _product(x.detach(), weights[0], None if bias is None else bias.detach())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_bias = gradient.flatten(0, -2).sum(0) if context.needs_input_grad[1] else None
        return gradient @ context.weight.dense(), of_bias, None


def _set_data(weight: Tensor, value: Tensor) -> None:
    """What `model.to` does with every parameter; torch would keep the class and exchange what lies below it."""
    if not isinstance(weight, NarrowWeight) or not isinstance(value, NarrowWeight):
        raise InvalidArgument(f"weights that are kept narrow cannot become others or move elsewhere; {REMEDY}")
    weight.raw, weight.format, weight.is_turned = value.raw, value.format, value.is_turned


def _embedding(ids: Tensor, weight: NarrowWeight) -> Tensor:
    """The rows of these ids alone are widened. What `nn.Embedding` may do besides, it does in training only."""
    if is_in_panels(weight):
        return panels.look_up(weight.raw, ids.reshape(-1)).view(*ids.shape, weight.shape[1])
    rows = weight.raw.index_select(0, ids.reshape(-1))  # which refuses negative ids, as torch's own does
    return NarrowWeight(rows, weight.format).dense().view(*ids.shape, weight.shape[1])


def is_narrow(weight: Any) -> bool:
    """Whether a weight is one of these; parameters of modules are."""
    return isinstance(weight, NarrowWeight)


def is_in_panels(weight: Any) -> bool:
    """Whether a weight's outputs lie in panels, which are multiplied whole."""
    return isinstance(weight, NarrowWeight) and weight.format.name == panels.NAME


def held(weight: Tensor) -> tuple[str, int]:
    """How a weight is stored in memory, and the bytes it takes."""
    if isinstance(weight, NarrowWeight):
        return weight.format.name, weight.raw.nbytes
    return str(weight.dtype).removeprefix("torch."), weight.nbytes


def address(weight: Tensor | None) -> int:
    """Where a weight lies; 0 where there is none."""
    if weight is None:
        return 0
    return weight.raw.data_ptr() if isinstance(weight, NarrowWeight) else weight.data_ptr()


def row_address(weight: Tensor | None, row: int) -> int:
    """Where a row of a weight, or an entry of a bias, lies."""
    if weight is None:
        return 0
    if is_in_panels(weight) and row % panels.PANEL:
        raise UnsupportedModel(f"row {row} is within a panel of {panels.PANEL} outputs, and no product begins there")
    return weight.raw[row].data_ptr() if isinstance(weight, NarrowWeight) else weight[row].data_ptr()


def product_of(weight: Tensor | None) -> int:
    """The address of the compiled product for a weight; 0 for what is no matrix."""
    if weight is None or weight.ndim != 2:
        return 0
    from forerun.kernels.cpu import integer as integer_product
    from forerun.kernels.cpu import panels as panel_product
    from forerun.kernels.cpu.product import product_address
    from forerun.kernels.cpu.widen import FLOAT32, number_of

    if is_in_panels(weight):
        return panel_product.product_address()
    if isinstance(weight, NarrowWeight) and weight.multiplies_integers:
        return integer_product.product_address()
    return product_address(number_of(weight.format.name) if isinstance(weight, NarrowWeight) else FLOAT32)
