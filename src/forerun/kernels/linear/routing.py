"""Routers for a few rows in Triton; the reference is `math.routing`.

One product, then one program that scores, chooses, and sorts (row, expert) pairs by expert: where torch takes fifteen
launches, which for one row cost more than the experts. Of experts with equal scores the one with the lower number is
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.linear import project
from forerun.math.routing import Router, Scoring

MOST_SCORES = 1 << 14  # that one program holds
SOFTMAX, SIGMOID = tl.constexpr(int(Scoring.SOFTMAX)), tl.constexpr(int(Scoring.SIGMOID))
TINY = tl.constexpr(1e-20)


@dataclass(frozen=True, slots=True)
class Routed:
    """(Row, expert) pairs, P = N * k of them."""

    shares: Tensor  # [P] what each counts, in the order of rows
    pairs: Tensor  # [P] row * k + place, sorted by expert
    ends: Tensor  # [E + 1] int32, where each expert's pairs begin in that order
    active: Tensor  # [min(E, P)] int32, experts that somebody chose, then others or -1
    most: int  # k
    is_distinct: bool = False  # whether a row is known to choose no expert twice


def route(x: Tensor, router: Router) -> Routed:
    """[N, H] -> pairs sorted by expert."""
    (rows, _), (count, _) = x.shape, router.weight.shape
    logits = torch.empty(rows, count, dtype=torch.float32 if router.is_wide else x.dtype, device=x.device)
    project.project_to(logits, x, router.weight, router.bias)
    pairs, block = rows * router.most, triton.next_power_of_2(count)
    shares = torch.empty(pairs, dtype=torch.float32, device=x.device)
    numbers = torch.empty(pairs + count + 1 + min(count, pairs), dtype=torch.int32, device=x.device)
    order, ends, active = numbers.split([pairs, count + 1, min(count, pairs)])
    routed = Routed(shares, order, ends, active, router.most, is_distinct=True)
    correction = logits if router.correction is None else router.correction
    places = triton.next_power_of_2(rows)
    choose_kernel[(1,)](
        routed.shares, routed.pairs, routed.ends, routed.active, logits, correction, rows, router.multiplier,
        min(count, pairs), COUNT=count, BLOCK=block, ROWS=places, MOST=router.most, SCORING=int(router.scoring),
        RENORMALISED=router.renormalised, HAS_CORRECTION=router.correction is not None, GROUPS=router.num_groups,
        TOP_GROUPS=router.top_groups, ROUNDED=not (router.is_wide or router.keeps_wide),
        num_warps=min(8, max(1, places * block // 256)),
    )  # fmt: skip
    return routed


def sort_pairs(chosen: Tensor, shares: Tensor, count: int) -> Routed:
    """The same of what another router chose, in torch: [N, k] both."""
    experts, pairs = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(count + 1, device=chosen.device)).to(torch.int32)
    active = (ends.diff() == 0).to(torch.int32).argsort(stable=True)[: min(count, len(pairs))].to(torch.int32)
    return Routed(shares.flatten(), pairs.to(torch.int32), ends, active, chosen.shape[1])


def why_not(x: Tensor, router: Router | None) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if router is None:
        return "a router of another kind"
    count = len(router.weight)
    is_even = router.num_groups == 1 or (count & (count - 1) == 0 and router.num_groups & (router.num_groups - 1) == 0)
    if not is_even or triton.next_power_of_2(count) * triton.next_power_of_2(len(x)) > MOST_SCORES:
        return f"{len(x)} rows and {count} experts in {router.num_groups} groups"
    return project.why_not(x, router.weight, fused=True)


@triton.jit(do_not_specialize=("R", "num_active"))
def choose_kernel(
    shares_ptr,  # [P] float32, out
    pairs_ptr,  # [P] int32, out
    ends_ptr,  # [E + 1] int32, out
    active_ptr,  # [num_active] int32, out
    logits_ptr,  # [N, E]
    correction_ptr,  # [E] float32
    R,
    multiplier,
    num_active,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program for all rows."""
    NOTHING = float("-inf")
    r = tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, BLOCK)[None, :]
    there = (r < R) & (e < COUNT)
    logits = tl.load(logits_ptr + r * COUNT + e, mask=there, other=NOTHING).to(tl.float32)
    scores = logits
    if SCORING == SOFTMAX:
        scores = weighed(logits, there)
    elif SCORING == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction_ptr + e, mask=e < COUNT, other=0.0)
    choice = tl.where(there, choice, NOTHING)
    if GROUPS > 1:
        groups = tl.reshape(choice, [ROWS, GROUPS, BLOCK // GROUPS])
        best = tl.max(groups, 2)
        if HAS_CORRECTION:
            i = tl.arange(0, BLOCK // GROUPS)[None, None, :]
            others = tl.where(i == tl.argmax(groups, 2)[:, :, None], NOTHING, groups)
            best += tl.max(others, 2)
        best = tl.where(r < R, best, 0.0)
        g = tl.arange(0, GROUPS)[None, :]
        kept = tl.zeros([ROWS, GROUPS], dtype=tl.int32)
        for _ in range(TOP_GROUPS):
            is_best = g == tl.argmax(best, 1)[:, None]
            kept = tl.where(is_best, 1, kept)
            best = tl.where(is_best, NOTHING, best)
        choice = tl.reshape(tl.where(kept[:, :, None] > 0, groups, NOTHING), [ROWS, BLOCK])
    place = tl.full([ROWS, BLOCK], -1, dtype=tl.int32)
    for j in range(MOST):
        is_best = e == tl.argmax(choice, 1)[:, None]
        place = tl.where(is_best, j, place)
        choice = tl.where(is_best, NOTHING, choice)
    is_chosen = (place >= 0) & there
    if SCORING == SOFTMAX or SCORING == SIGMOID:
        shares = tl.where(is_chosen, scores, 0.0)
        if RENORMALISED:
            shares = shares / (tl.sum(shares, 1) + TINY)[:, None]
    else:
        shares = weighed(logits, is_chosen)
    shares *= multiplier
    if ROUNDED:
        shares = shares.to(logits_ptr.dtype.element_ty).to(tl.float32)
    pair = r * MOST + place
    tl.store(shares_ptr + pair, shares, mask=is_chosen)
    one = is_chosen.to(tl.int32)
    counts = tl.sum(one, 0)
    begins = tl.cumsum(counts, 0) - counts
    tl.store(pairs_ptr + begins[None, :] + tl.cumsum(one, 0) - one, pair, mask=is_chosen)
    n = tl.arange(0, BLOCK)
    tl.store(ends_ptr + n, begins, mask=n < COUNT)
    tl.store(ends_ptr + COUNT, tl.sum(counts, 0))
    is_active = (counts > 0).to(tl.int32)
    tl.store(active_ptr + tl.cumsum(is_active, 0) - 1, n, mask=is_active > 0)
    tl.store(active_ptr + n, -1, mask=(n >= tl.sum(is_active, 0)) & (n < num_active))


@triton.jit
def weighed(logits, there):
    """The softmax of each row over what is there; nothing elsewhere."""
    logits = tl.where(there, logits, float("-inf"))
    peak = tl.max(logits, 1)[:, None]
    weights = tl.where(there, tl.exp(logits - tl.where(peak == float("-inf"), 0.0, peak)), 0.0)
    total = tl.sum(weights, 1)[:, None]
    return weights / tl.where(total > 0.0, total, 1.0)
