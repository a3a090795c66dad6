"""Products of a few rows with a large weight in Triton; the reference is `math.skinny`.

Weights are read once, at the speed of memory; what stands before a product (a norm) and after it (bias, residual, gate,
rotation and the cache's write) is done on the way. Each kernel may begin while the one before it ends (a dependent
launch): it asks for its weights and then waits for its input.

A row's numbers depend on its own input alone, given the number of rows rounded up as `ROWS` says: other tiles add up in
another order. Sums over several programs are added in a fixed order, so the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from forerun.kernels import skinny_device as device
from forerun.kernels.launching import is_interpreted, starts_early
from forerun.kernels.norm import normed
from forerun.math.skinny import Heads, Norm

ENDS = (device.PLAIN, device.GATED, device.ROTATED)
MOST_ROWS = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_NORMED = 16  # rows that every program norms for itself; float16 could overflow before it is divided
MOST_TILES = 1 << 14  # with several programs each


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of one launch. No tensor cores: `splits` is 0 and one row is meant."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 0
    lines: int = 0  # of each weight row, asked for before the input is there


def project(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
    plan: Plan | None = None,
) -> Tensor:  # [R, N]
    """norm(x) @ weight.T + bias + residual."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(device.PLAIN, out, len(weight), x, weight, bias, norm, residual, None, plan)
    return out


def gate(x: Tensor, weight: Tensor, norm: Norm | None = None, plan: Plan | None = None) -> Tensor:
    """[R, K] with [2 * N, K] -> [R, N]: silu of the product with the first half, times that with the second."""
    out = x.new_empty(x.shape[0], len(weight) // 2)
    _launch(device.GATED, out, len(weight) // 2, x, weight, None, norm, None, None, plan)
    return out


def project_heads(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [(Hq + 2 Hk) * D, K]
    bias: Tensor | None,
    norm: Norm | None,
    heads: Heads,
    plan: Plan | None = None,
) -> Tensor:  # [R, Hq, D]
    """Rotated queries; rotated keys, and values, are written to the cache."""
    out = x.new_empty(x.shape[0], heads.num_queries, heads.size)
    _launch(device.ROTATED, out, len(weight) // 2, x, weight, bias, norm, None, heads, plan)
    return out


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything."""
    if x.ndim != 2 or not 0 < x.shape[0] <= MOST_ROWS:
        return f"{x.shape[:-1].numel()} rows, more than {MOST_ROWS}"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"rows of {x.dtype}, a weight of {weight.dtype}"
    if not x.is_contiguous() or not weight.is_contiguous() or min(weight.shape) < 2:
        return "a weight or rows that are not contiguous"
    return None


def _launch(
    end: Any,
    out: Tensor,
    outputs: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    heads: Heads | None,
    plan: Plan | None,
) -> None:
    rows, width = x.shape
    if norm is not None and (rows > MOST_NORMED or x.dtype is torch.float16):
        x, norm = normed(x, norm), None
    plan = plan or choose(rows, outputs, width, end is not device.PLAIN, x.dtype)
    early = starts_early(x.device)
    places = (x,) * 6 if heads is None else heads.tensors
    read = [x, weight, _or(bias, x), x if norm is None else norm.weight, _or(residual, x), *places]
    epsilon = 0.0 if norm is None else norm.epsilon
    flags = {
        "END": end, "HEADS": heads.num_queries if heads else 1, "KEY_HEADS": heads.num_keys if heads else 1,
        "SIZE": heads.size if heads else 2, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
        "HAS_NORM": norm is not None, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
        "EARLY": early, "LINES": plan.lines, "num_warps": plan.warps, **({"launch_pdl": True} if early else {}),
    }  # fmt: skip
    if not plan.splits:
        grid = (triton.cdiv(outputs, plan.block_n),)
        device.vector_kernel[grid](out, *read, outputs, width, epsilon, STAGES=plan.stages, **flags)
        return
    chunk = -(-width // (plan.splits * plan.block_k)) * plan.block_k
    part, count = out, out
    if plan.splits > 1:
        part, count = out.new_empty(plan.splits, *out.shape, dtype=torch.float32), _counters(x.device)
    device.tile_kernel[(triton.cdiv(outputs, plan.block_n), plan.splits)](
        out, part, count, *read, rows, outputs, width, chunk, epsilon, ROWS=max(16, triton.next_power_of_2(rows)),
        SPLITS=plan.splits, UPCAST=is_interpreted(x) and x.dtype is torch.bfloat16, num_stages=plan.stages, **flags,
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


@cache
def _counters(place: torch.device) -> Tensor:
    """How many programs of each tile have arrived. Back to zero when all have, so one stream at a time may use it."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=place)


def choose(rows: int, outputs: int, width: int, in_pairs: bool, dtype: torch.dtype) -> Plan:
    """Which form measured fastest."""
    if rows == 1:
        return Plan(4 if in_pairs else 8, 512, 4, 1, lines=16)
    if dtype is torch.float32:  # without tensor cores a product is so much code that a large tile takes long to compile
        return Plan(32, 32, 4, 3, 1)
    if in_pairs:
        return Plan(32, 128, 4, 4, 1, 4)
    return Plan(64, 128, 4, 4, 1 if outputs > 8192 else 4, 4)
