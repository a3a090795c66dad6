"""Products of a few rows with a large weight in Triton; the reference is `math.skinny`.

Weights are read once, at the speed of memory; what stands after a product (bias, residual, gate, rotation and the
cache's write) is done on the way, and for a single row the norm before it as well.

A row's numbers depend on its own input alone as long as the number of rows stays between the same two of `ROWS`; other
tiles add up in another order. Sums that several programs share are added in a fixed order: the same input gives the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from forerun.kernels.counters import shared_counters
from forerun.kernels.launching import DTYPES, early, multiprocessors, needs_upcast
from forerun.kernels.linear import device, widen
from forerun.kernels.linear.norms import normed
from forerun.kernels.linear.rounding import round_rows
from forerun.math.scaled import RoundedRows, RoundedWeight
from forerun.math.skinny import Activation, Heads, Norm

AnyRows = Tensor | RoundedRows
ENDS = (device.PLAIN, device.GATED, device.ROTATED)
ROWS = (1, 16, 64)  # up to these the same kernel is used
MOST_TILES = 1 << 14  # with several programs each
# Libraries have no good product for another number of outputs: 56 rows by Whisper's 51865 ids took 244 us, here 41.
ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of one launch. Where `splits` is 0 no tensor cores are used, and one row is meant."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 0


# Every number here was chosen by measuring (docs/log.md).
ONE_ROW = Plan(4, 1024, 4, 1)
ONE_ROW_IN_PAIRS = Plan(4, 512, 4, 3)
ONE_ROW_IN_ONE_WAVE = Plan(8, 256, 4, 3)  # where the device has room for all programs at once, and few to spare
ONE_WAVE = (4, 6)  # such programs a multiprocessor
FEW_ROWS = Plan(64, 128, 4, 4, 1)
FEW_ROWS_CUT = Plan(64, 128, 4, 4, 4)
FEW_OUTPUTS = 8192  # below, there are too few tiles to keep every multiprocessor reading
FEW_ROWS_IN_PAIRS = Plan(32, 128, 2, 4, 1)
MORE_ROWS = Plan(64, 64, 4, 6, 1)
MORE_ROWS_CUT = Plan(64, 128, 4, 4, 2)
MORE_ROWS_IN_PAIRS = Plan(128, 64, 8, 4, 1)
MORE_ROWS_IN_ONE_WAVE = Plan(64, 128, 4, 3, 1)  # in pairs, where every multiprocessor has room for one program
# From here on sums are so long, and outputs so many, that a library's products of 17 to 64 rows are the slower ones, as
# long as all programs run at once: StarCoder2's 288 and 144 took 1.4 times as long as the library's.
LONG_SUMS, LONG_SUMS_OUTPUTS = 8192, 3072
RESIDENT, RESIDENT_CUT = 2, 1  # programs of MORE_ROWS, of MORE_ROWS_CUT that a multiprocessor has room for
WITHOUT_TENSOR_CORES = Plan(32, 32, 4, 3, 1)  # float32: so much code that a large tile would take long to compile
# Weights of 8 and 4 bits. One row is rounded by the kernel itself where outputs do not come in pairs; where they do,
# that was measured slower than tensor cores behind a launch that norms and rounds. Of a tile of one row a thread has at
# least as many bytes as it adds up by itself: lanes that add up each other's products round each in another place.
ONE_ROW_OF_BYTES = Plan(8, 512, 2, 4)
ONE_ROW_OF_BYTES_IN_PAIRS = Plan(8, 512, 2, 3)
ONE_ROW_OF_BYTES_IN_MORE_PAIRS = Plan(16, 512, 2, 2)
ONE_ROW_OF_HALF_BYTES = Plan(8, 1024, 2, 3)
ONE_ROUNDED_ROW = Plan(16, 2048, 4, 2)
FEW_ROWS_OF_BYTES = Plan(64, 256, 4, 3, 1)
FEW_ROWS_OF_BYTES_CUT = Plan(32, 128, 2, 4, 4)
FEW_ROWS_OF_BYTES_IN_PAIRS = Plan(16, 256, 1, 4, 1)
MORE_OUTPUTS_OF_BYTES_IN_PAIRS = Plan(32, 128, 2, 4, 1)
MORE_ROWS_OF_BYTES = Plan(64, 128, 4, 4, 1)
MORE_ROWS_OF_BYTES_CUT = Plan(64, 128, 4, 4, 4)
ROUNDED_ROWS = Plan(64, 256, 4, 4, 1)
ROUNDED_ROWS_CUT = Plan(64, 128, 4, 6, 4)
ROUNDED_ROWS_IN_PAIRS = Plan(16, 256, 1, 4, 1)
MORE_ROUNDED_ROWS_IN_PAIRS = Plan(64, 128, 4, 4, 1)  # or more outputs
FEW_ROWS_OF_HALF_BYTES = Plan(32, 256, 2, 4, 1)
FEW_ROWS_OF_HALF_BYTES_CUT = Plan(64, 256, 2, 4, 4)
WITHOUT_TENSOR_CORES_IN_GROUPS = Plan(32, 128, 4, 3, 1)


def project(
    x: AnyRows,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
    activation: Activation = Activation.NONE,
    multiplier: float = 1.0,
    plan: Plan | None = None,
) -> Tensor:  # [R, N]
    """residual + multiplier * activation(norm(x) @ weight.T + bias)."""
    out = _empty(x, weight, weight.shape[0])
    _launch(device.PLAIN, out, len(weight), x, weight, bias, norm, plan, residual, activation, multiplier)
    return out


def project_to(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The product alone, left in `out` [R, N], which may be of float32."""
    _launch(device.PLAIN, out, len(weight), x, weight, bias, None, None)


def gate(
    x: AnyRows,  # [R, K]
    weight: Tensor,  # [2 N, K]
    norm: Norm | None = None,
    bias: Tensor | None = None,  # [2 N]
    activation: Activation = Activation.SILU,
    plan: Plan | None = None,
) -> Tensor:  # [R, N]
    """The product with the first half of the weight, activated, times that with the second."""
    out = _empty(x, weight, len(weight) // 2)
    _launch(device.GATED, out, len(weight) // 2, x, weight, bias, norm, plan, activation=activation)
    return out


def project_heads(
    x: AnyRows,  # [R, K]
    weight: Tensor,  # [(Hq + 2 Hk) * D, K]
    bias: Tensor | None,
    norm: Norm | None,
    heads: Heads,
    plan: Plan | None = None,
) -> Tensor:  # [R, Hq, D]
    """Rotated queries; rotated keys, and values, are written to the cache."""
    out = _empty(x, weight, heads.num_queries, heads.size)
    _launch(device.ROTATED, out, len(weight) // 2, x, weight, bias, norm, plan, heads=heads)
    return out


def _empty(x: AnyRows, weight: Tensor, *size: int) -> Tensor:
    return torch.empty(len(x), *size, dtype=x.dtype, device=weight.device)


def why_not(x: AnyRows, weight: Tensor, fused: bool = False, in_pairs: bool = False) -> str | None:
    """Why the library's product is to be used, in words; None where one of these is the faster one.

    `fused`: something follows the product that the library has no word for; `in_pairs`: as `choose`.
    """
    if isinstance(x, RoundedRows):
        return None if 0 < len(x) <= ROWS[2] else f"{len(x)} rows, more than {ROWS[2]}"
    is_narrow = x.dtype is not torch.float32
    is_odd = weight.shape[0] % ALIGNED != 0 and is_narrow
    is_long = weight.shape[1] >= LONG_SUMS and LONG_SUMS_OUTPUTS <= weight.shape[0] <= FEW_OUTPUTS and is_narrow
    pays = in_pairs or ((fused or is_long) and _is_one_wave(weight))
    most = ROWS[2 if pays or is_odd or isinstance(weight, RoundedWeight) else 1]
    if x.ndim != 2 or not 0 < x.shape[0] <= most:
        return f"{x.shape[:-1].numel()} rows, more than {most}"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"rows of {x.dtype}, a weight of {weight.dtype}"
    if isinstance(weight, RoundedWeight):
        if weight.shape[1] % 2:
            return f"{weight.shape[1]} inputs, which is odd"
        weight = weight.raw
    if not x.is_contiguous() or not weight.is_contiguous() or min(weight.shape) < 2:
        return "a weight or rows that are not contiguous"
    return None


def _is_one_wave(weight: Tensor) -> bool:
    """Whether all programs of a product of 17 to 64 rows run at once: those that do not take as long again."""
    is_cut = len(weight) <= FEW_OUTPUTS
    plan, resident = (MORE_ROWS_CUT, RESIDENT_CUT) if is_cut else (MORE_ROWS, RESIDENT)
    return triton.cdiv(len(weight), plan.block_n) * plan.splits <= resident * multiprocessors(weight.device)


def choose(
    rows: int, outputs: int, in_pairs: bool, dtype: torch.dtype, place: torch.device, form: Any = widen.WIDE
) -> Plan:
    """Which shape measured fastest; `in_pairs`: with two weight rows for each output."""
    if form is not widen.WIDE:
        return _choose_narrow(rows, outputs, in_pairs, dtype, form)
    if rows == 1 and in_pairs:
        filling = outputs / ONE_ROW_IN_ONE_WAVE.block_n / multiprocessors(place)
        return ONE_ROW_IN_ONE_WAVE if ONE_WAVE[0] < filling <= ONE_WAVE[1] else ONE_ROW_IN_PAIRS
    if rows == 1:
        return ONE_ROW
    if dtype is torch.float32:
        return WITHOUT_TENSOR_CORES
    if rows > ROWS[1] and in_pairs:
        is_one_wave = triton.cdiv(outputs, MORE_ROWS_IN_ONE_WAVE.block_n) <= multiprocessors(place)
        return MORE_ROWS_IN_ONE_WAVE if is_one_wave else MORE_ROWS_IN_PAIRS
    if rows > ROWS[1]:
        return MORE_ROWS if outputs > FEW_OUTPUTS else MORE_ROWS_CUT
    if in_pairs:
        return FEW_ROWS_IN_PAIRS
    return FEW_ROWS if outputs > FEW_OUTPUTS else FEW_ROWS_CUT


def _choose_narrow(rows: int, outputs: int, in_pairs: bool, dtype: torch.dtype, form: Any) -> Plan:
    is_cut = not in_pairs and outputs <= FEW_OUTPUTS
    if form is widen.ROUNDED:
        if in_pairs:
            is_few = rows <= ROWS[1] and outputs <= FEW_OUTPUTS
            return ROUNDED_ROWS_IN_PAIRS if is_few else MORE_ROUNDED_ROWS_IN_PAIRS
        if rows == 1:
            return ONE_ROUNDED_ROW
        if rows > ROWS[1]:
            return MORE_ROWS_OF_BYTES_CUT if is_cut else MORE_ROWS_OF_BYTES
        return ROUNDED_ROWS_CUT if is_cut else ROUNDED_ROWS
    if rows == 1 and form is widen.INT4:
        return ONE_ROW_OF_HALF_BYTES
    if rows == 1 and in_pairs:
        return ONE_ROW_OF_BYTES_IN_PAIRS if outputs <= FEW_OUTPUTS else ONE_ROW_OF_BYTES_IN_MORE_PAIRS
    if rows == 1:
        return ONE_ROW_OF_BYTES
    if dtype is torch.float32:
        return WITHOUT_TENSOR_CORES if form is widen.INT8 else WITHOUT_TENSOR_CORES_IN_GROUPS
    if rows > ROWS[1]:
        return MORE_ROWS_OF_BYTES_CUT if is_cut else MORE_ROWS_OF_BYTES
    if form is widen.INT8 and in_pairs:
        return FEW_ROWS_OF_BYTES_IN_PAIRS if outputs <= FEW_OUTPUTS else MORE_OUTPUTS_OF_BYTES_IN_PAIRS
    if form is widen.INT8:
        return FEW_ROWS_OF_BYTES_CUT if is_cut else FEW_ROWS_OF_BYTES
    return FEW_ROWS_OF_HALF_BYTES_CUT if is_cut else FEW_ROWS_OF_HALF_BYTES


def _launch(
    end: Any,
    out: Tensor,
    outputs: int,
    x: AnyRows,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    plan: Plan | None,
    residual: Tensor | None = None,
    activation: Activation = Activation.NONE,
    multiplier: float = 1.0,
    heads: Heads | None = None,
) -> None:
    rows, width = len(x), weight.shape[1]
    plan = plan or choose(rows, outputs, end is not device.PLAIN, x.dtype, weight.device, form_of(weight))
    if norm is not None and plan.splits:
        assert isinstance(x, Tensor), "rows are normed before they are rounded"
        x, norm = normed(x, norm), None  # tensor cores take what is normed and rounded
    x, stored, form = _stored(x, weight, tiled=plan.splits > 0)
    order = None if heads is None else heads.order
    places = (x,) * 5 if heads is None else heads.tensors
    tensors = [out, x, *stored, _or(bias, x), _or(residual, x), *places, _or(order, x)]
    cos_row = 0 if heads is None else heads.cos.stride(0)
    applied = norm or Norm(x, 0.0)
    if plan.splits:
        more = {"ROWS": max(16, triton.next_power_of_2(rows)), "SPLITS": plan.splits, "UPCAST": needs_upcast(x)}
    else:
        more = {"STAGES": plan.stages, "HAS_NORM": norm is not None, "NORM_WIDE": applied.wide,
                "LARGEST": _largest(x, weight)}  # fmt: skip
    options = early(x.device) if may_begin_early(plan, form["FORM"]) else {"EARLY": False}
    case = device.ProductCase(
        form["FORM"].value, form["GROUP"], form["FAST"], end.value, int(activation),
        HEADS=heads.num_queries if heads else 1, KEY_HEADS=heads.num_keys if heads else 1,
        SIZE=heads.size if heads else 2, TURNING=heads.cos.shape[1] if heads else 2,
        INTERLEAVED=heads is not None and heads.interleaved, HAS_ORDER=order is not None, BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, EARLY=options.pop("EARLY"),
        **more,
    )  # fmt: skip
    grid = triton.cdiv(outputs, plan.block_n)
    if not plan.splits:
        numbers = outputs, width, cos_row, multiplier, applied.epsilon, applied.offset
        device.vector_kernel[(grid,)](*tensors, applied.weight, *numbers, CASE=case, num_warps=plan.warps, **options)
        return
    chunk = -(-width // (plan.splits * plan.block_k)) * plan.block_k
    device.tile_kernel[(grid, plan.splits)](
        *tensors, *_room(out, plan), rows, outputs, width, chunk, cos_row, multiplier, CASE=case,
        num_warps=plan.warps, num_stages=plan.stages, **options,
    )  # fmt: skip


def may_begin_early(plan: Plan, form: Any) -> bool:
    """Tiles that are widened are slower for it, by up to 7 %: they have few registers to share."""
    return not plan.splits or form in (widen.WIDE, widen.ROUNDED)


def form_of(weight: Tensor) -> Any:
    """How a weight is stored, as the kernels know it."""
    if not isinstance(weight, RoundedWeight):
        return widen.WIDE
    if weight.scheme.is_packed:
        return widen.INT4
    return widen.ROUNDED if weight.scheme.rounds_rows else widen.INT8


def _largest(x: Tensor, weight: Tensor) -> float:
    """What the largest number of a row becomes that the kernel rounds itself; 0 where it does not."""
    if isinstance(weight, RoundedWeight) and weight.scheme.rounds_rows and x.dtype == weight.dtype:
        return weight.scheme.largest
    return 0.0


def _stored(x: AnyRows, weight: Tensor, tiled: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The rows as they are multiplied; the weight, its scales and those of the rows; how the weight is stored.

    The kernel of one row, which is not `tiled`, rounds it by itself; tiles of weights that are widened come in pairs.
    """
    if not isinstance(weight, RoundedWeight):
        assert isinstance(x, Tensor)
        return x, (weight, x, x), {"FORM": widen.WIDE, "GROUP": 0, "FAST": False}
    flags = {"FORM": form_of(weight), "GROUP": weight.scheme.group, "FAST": weight.device.type != "cpu"}
    if isinstance(x, Tensor) and not (weight.scheme.rounds_rows and tiled):
        raw = weight.raw.view(torch.int16) if tiled and flags["FORM"] is widen.INT8 else weight.raw
        return x, (raw, weight.scales, x), flags
    rows = round_rows(x, weight.scheme) if isinstance(x, Tensor) else x
    return rows.values, (weight.raw, weight.scales, rows.scales), flags


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _room(out: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Where programs that share a sum leave their parts, and count themselves."""
    if plan.splits == 1:
        return out, out  # never touched
    return out.new_empty(plan.splits, *out.shape, dtype=torch.float32), shared_counters(MOST_TILES, out.device)
