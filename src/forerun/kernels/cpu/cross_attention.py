"""Cross-attention of few new tokens over long sources: each key and value is read once for four of them."""

from __future__ import annotations

from functools import cache, partial
from itertools import accumulate

import numpy as np
import torch
from numba import prange
from torch import Tensor

from forerun.kernels.cpu.attention import MOST_QUERIES, attend
from forerun.kernels.cpu.choice import is_gain
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.measured import remembered, seconds
from forerun.kernels.cpu.memory import Ints
from forerun.kernels.cpu.threads import most_threads, turn
from forerun.kernels.cpu.widen import LANES
from forerun.math import attention as reference
from forerun.math.attention import AttentionPlan, Scale, plan_across

TIMED_KEYS, TIMED_COUNTS = 1500, (1, 4)  # a Whisper's window; a plain step and a short draft
FAR_APART = 4  # layers walked through between repeats, so that keys come from memory as in a real step


@njit(nogil=True, parallel=True, cache=True)
def _across(
    q: int,
    k: int,
    v: int,
    out: int,
    starts: Ints,  # [R] where each source begins, in floats
    lengths: Ints,  # [R] its keys
    ends: Ints,  # [R + 1] where each row's queries begin and end
    heads: int,
    size: int,
    scale: float,
    scores: int,
    longest: int,
    num_threads: int,
) -> None:
    total = ends[-1]
    for part in prange(num_threads):
        for unit in range(part, len(starts) * heads, num_threads):
            row, head = unit // heads, unit % heads
            source = (starts[row] + head * size) * 4
            done = ends[row]
            while done < ends[row + 1]:
                count = min(MOST_QUERIES, ends[row + 1] - done)
                at = (head * total + done) * size * 4
                room = scores + part * MOST_QUERIES * longest * 4
                attend(q + at, k + source, v + source, out + at, count, size, heads * size, lengths[row], scale, room)
                done += count


def why_not(query: Tensor, keys: Tensor, values: Tensor, scale: Scale) -> str | None:
    """What the kernel does not cover of queries [N, Hq, D] over pools [R, Hk, C, D]; None where it covers all."""
    if query.device.type != "cpu" or not query.dtype == keys.dtype == values.dtype == torch.float32:
        return f"queries of {query.dtype} on {query.device.type}, keys of {keys.dtype}, values of {values.dtype}"
    if keys.shape != values.shape or keys.shape[-1] % LANES:
        return f"keys of size {keys.shape[-1]}, values of size {values.shape[-1]}"
    if not keys.transpose(1, 2).is_contiguous() or not values.transpose(1, 2).is_contiguous():
        return "a pool that is not contiguous"
    if scale.softcap is not None or scale.sinks is not None:
        return "a softcap or sinks"
    return None


def attend_across(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: Scale, num_threads: int
) -> Tensor:  # [N, Hq, D]
    """Each row's queries over all keys of its source; see `forerun.math.attention.attend`."""
    rows, (_, heads, capacity, size) = plan.rows, keys.shape
    tokens, group = query.shape[0], query.shape[1] // heads
    # The queries of one key head side by side: [N, Hk, G, D] -> [Hk, N * G, D].
    by_head = query.reshape(tokens, heads, group, size).transpose(0, 1).contiguous()
    out = torch.empty_like(by_head)
    lengths = rows.lengths
    scores = torch.empty(num_threads * MOST_QUERIES * max(lengths), dtype=torch.float32)
    with turn(num_threads):
        _across(
            by_head.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            np.array([slot * capacity * heads * size for slot in rows.slots]), np.array(lengths),
            np.array(list(accumulate((count * group for count in rows.counts), initial=0))),
            heads, size, scale.factor, scores.data_ptr(), max(lengths), num_threads,
        )  # fmt: skip
    return out.view(heads, tokens, group, size).transpose(0, 1).reshape(tokens, heads * group, size)


@cache
def is_faster(heads: int, size: int) -> bool:
    """Whether the kernel beats torch's attention on this machine, over plain steps and short drafts together."""
    threads = most_threads()
    times = remembered(f"across {heads}x{size} threads {threads}", lambda: compare(heads, size, threads))
    return is_gain(*times)


@torch.inference_mode()
def compare(heads: int, size: int, threads: int) -> tuple[float, float]:
    """Seconds of (ours, torch's)."""
    pools = [torch.rand(2, 1, TIMED_KEYS, heads, size, dtype=torch.float32).transpose(2, 3) for _ in range(FAR_APART)]
    scale, totals = Scale(size**-0.5, None, None), {"ours": 0.0, "torch": 0.0}
    for count in TIMED_COUNTS:
        query = torch.rand(count, heads, size, dtype=torch.float32)
        plan = plan_across((0,), (TIMED_KEYS,), (count,), 1, query.device)
        best = seconds({"ours": partial(_ours, query, pools, plan, scale, threads),
                        "torch": partial(_torch, query, pools, plan, scale)})  # fmt: skip
        totals = {name: totals[name] + best[name] for name in totals}
    return totals["ours"], totals["torch"]


def _ours(query: Tensor, pools: list[Tensor], plan: AttentionPlan, scale: Scale, threads: int) -> None:
    for keys, values in pools:
        attend_across(query, keys, values, plan, scale, threads)


def _torch(query: Tensor, pools: list[Tensor], plan: AttentionPlan, scale: Scale) -> None:
    for keys, values in pools:
        reference.attend(query, keys, values, plan, scale)
