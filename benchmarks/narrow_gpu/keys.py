"""Attention of one new token over long rows whose keys and values are plain, or rounded to eight bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.attention import Scale
from forerun.math.ragged_attention import Reach
from forerun.math.scaled import FP8, INT8, Scheme, rounded_rows
from forerun.measure.timing import replay_times

HEADS, SIZE, BLOCK = 32, 128, 128
CONTEXTS = (4096, 16384)
KINDS: dict[str, Scheme | None] = {"bf16 keys": None, "int8 keys": INT8, "fp8 keys": FP8}
COLD = 240_000_000  # bytes that no cache holds


def bytes_read(context: int, scheme: Scheme | None) -> int:
    return 2 * context * HEADS * (2 * SIZE if scheme is None else SIZE + 4)


def seconds(context: int, scheme: Scheme | None, repeats: int, device: torch.device) -> float:
    """The best of several stretches of replays, each over as many layers as make keys cold."""
    layers = max(2, -(-COLD // bytes_read(context, scheme)))
    return min(replay_times([_call(context, scheme, device) for _ in range(layers)], repeats))


def _call(context: int, scheme: Scheme | None, device: torch.device) -> Callable[[], Tensor]:
    from forerun import ops

    query = torch.randn(1, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    keys, values = (_pool(context, scheme, device) for _ in range(2))
    slots, lengths, starts = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0], [context - 3], [0, 1])
    )
    table = torch.arange(1, context // BLOCK + 1, dtype=torch.int32, device=device)[None]
    reach = Reach(slots, lengths, starts, 1, context, table=table)
    return lambda: ops.attend_ragged(query, keys, values, reach, Scale(SIZE**-0.5))


def _pool(context: int, scheme: Scheme | None, device: torch.device) -> Tensor:
    """[blocks, heads, places, size]"""
    wide = torch.randn(context // BLOCK + 1, BLOCK, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    if scheme is None:
        return wide.transpose(1, 2)
    raw, scales = rounded_rows(wide, scheme)
    return ScaledKeys(raw, scales.transpose(1, 2).contiguous(), scheme, wide.dtype).by_head()
