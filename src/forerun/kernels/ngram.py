"""Drafts from n-gram counts in one launch, one program a row; the reference is `math.ngram`.

A row's context is one number, and contexts of n tokens are what it leaves modulo (V + 1) ** n. So all lengths are
looked up at once, a lane each, and a drawn token is one multiplication away from the next contexts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.math.ngram import NgramDraft, Ngrams
from forerun.types import LawParams

NEGATIVE = tl.constexpr(float("-inf"))
TINY, HUGE = tl.constexpr(torch.finfo(torch.float64).tiny), tl.constexpr(torch.finfo(torch.float64).max)
NUMBERS = ("num_contexts", "num_entries", "halvings", "recent_stride", "width", "vocab_size", "order", "most", "steps")
TENSORS = (
    "contexts_ptr", "starts_ptr", "tokens_ptr", "counts_ptr", "powers_ptr", "recent_ptr", "known_ptr", "heat_ptr",
    "top_k_ptr", "top_p_ptr", "min_p_ptr", "uniforms_ptr", "out_ptr", "ids_ptr", "probs_ptr",
)  # fmt: skip


def draft_ngrams(table: Ngrams, recent: Tensor, known: Tensor, params: LawParams, uniforms: Tensor) -> NgramDraft:
    """K tokens a row, each drawn by inverse CDF from the continuations of what is there by then."""
    (rows, steps), most = uniforms.shape, table.most
    tokens = recent.new_empty(rows, steps)
    ids = recent.new_empty(rows, steps, most)
    probs = recent.new_empty(rows, steps, most, dtype=torch.float32)
    contexts = len(table.contexts)
    _draft_kernel[(rows,)](
        table.contexts, table.starts, table.tokens, table.counts, table.powers, recent, known,
        params.temperature, params.top_k, params.top_p, params.min_p, uniforms.contiguous(), tokens, ids, probs,
        contexts, len(table.tokens), contexts.bit_length(), recent.stride(0), recent.shape[1], table.vocab_size,
        table.order, most, steps,
        LENGTHS=triton.next_power_of_2(max(table.order, 2)), SLOTS=triton.next_power_of_2(max(most, 2)), num_warps=1,
    )  # fmt: skip
    return NgramDraft(tokens, ids, probs)


@triton.jit
def _context(recent, known, powers_ptr, width, vocab_size, order, LENGTHS: tl.constexpr):
    """The newest tokens as one number, up to the first that the table cannot know."""
    i = tl.arange(0, LENGTHS)
    is_there = (i < order - 1) & (i < width) & (i < known)
    token = tl.load(recent + width - 1 - i, mask=is_there, other=-1)
    is_strange = ((token < 0) | (token >= vocab_size)).to(tl.int32)
    power = tl.load(powers_ptr + i, mask=i < order, other=0)
    return tl.sum(tl.where(tl.cumsum(is_strange, 0) == 0, (token + 1) * power, 0), axis=0)


@triton.jit
def _longest(context, contexts_ptr, powers_ptr, num_contexts, halvings, order, LENGTHS: tl.constexpr):
    """Where the longest known end of a context lies in the table."""
    n = tl.arange(0, LENGTHS)
    power = tl.load(powers_ptr + n, mask=n < order, other=1)
    shorter = tl.load(powers_ptr + n - 1, mask=(n > 0) & (n < order), other=0)
    wanted = context % power
    low, high = tl.zeros_like(wanted), tl.zeros_like(wanted) + num_contexts
    for _ in range(halvings):
        middle = (low + high) // 2
        is_below = tl.load(contexts_ptr + middle, mask=low < high, other=0) < wanted
        low, high = tl.where((low < high) & is_below, middle + 1, low), tl.where(is_below, high, middle)
    known_context = tl.load(contexts_ptr + low, mask=low < num_contexts, other=-1)
    is_known = (n < order) & (known_context == wanted) & (wanted >= shorter)
    length = tl.max(tl.where(is_known, n, 0), axis=0)
    return tl.sum(tl.where(n == length, low, 0), axis=0)


@triton.jit
def _cut(weights, is_cut, threshold):
    threshold = tl.where(is_cut, threshold, NEGATIVE)
    return tl.where(weights < threshold, NEGATIVE, weights)


@triton.jit
def _entry(values, s, place):
    """The value at `place`, which may be -inf: such a threshold cuts nothing."""
    return tl.max(tl.where(s == place, values, NEGATIVE), axis=0)


@triton.jit
def _law(weights, s, most, heat, top_k, top_p, min_p):
    """`math.laws.warp` and a softmax of log-weights that never increase."""
    is_sampled = heat > 0
    is_plain = (heat == 0) | (heat == 1)
    divisor = tl.minimum(tl.maximum(tl.where(is_plain, 1.0, heat), TINY), HUGE)
    shift = tl.where(is_plain, 0.0, tl.max(weights, axis=0))
    weights = (weights - shift) / divisor
    weights = _cut(weights, is_sampled & (top_k > 0) & (top_k < most), _entry(weights, s, top_k - 1))
    peak = tl.max(weights, axis=0)
    log_mass = peak + tl.log(tl.sum(tl.exp(weights - peak), axis=0))
    held = tl.cumsum(tl.exp(weights - log_mass), 0)
    num_passed = tl.sum(((held < top_p) & (s < most - 1)).to(tl.int32), axis=0)
    weights = _cut(weights, is_sampled & (top_p < 1), _entry(weights, s, num_passed))
    weights = _cut(weights, is_sampled & (min_p > 0), peak + tl.log(tl.maximum(min_p, TINY)))
    mass = tl.exp(weights - peak)
    return tl.where(is_sampled, mass / tl.sum(mass, axis=0), tl.where(s == 0, 1.0, 0.0))


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TENSORS)
def _draft_kernel(
    contexts_ptr, starts_ptr,  # [N] and [N + 1] int64
    tokens_ptr, counts_ptr,  # [M] int32
    powers_ptr,  # [order] int64
    recent_ptr, known_ptr,  # [R, W] and [R] int64
    heat_ptr, top_k_ptr, top_p_ptr, min_p_ptr,  # [R]
    uniforms_ptr,  # [R, K] float64
    out_ptr, ids_ptr, probs_ptr,  # [R, K], [R, K, S] int64, [R, K, S] float32
    num_contexts, num_entries, halvings, recent_stride, width, vocab_size, order, most, steps,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heat, top_k = tl.load(heat_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    recent = recent_ptr + row * recent_stride
    context = _context(recent, tl.load(known_ptr + row), powers_ptr, width, vocab_size, order, LENGTHS)
    last_power = tl.load(powers_ptr + tl.maximum(order - 2, 0))  # 1 where there is room for one token, or none
    s = tl.arange(0, SLOTS)
    for i in range(steps):
        index = _longest(context, contexts_ptr, powers_ptr, num_contexts, halvings, order, LENGTHS)
        entry, end = tl.load(starts_ptr + index) + s, tl.load(starts_ptr + index + 1)
        is_used = (entry < end) & (s < most)
        entry = tl.minimum(entry, num_entries - 1)
        ids = tl.load(tokens_ptr + entry, mask=s < most, other=0).to(tl.int64)
        counts = tl.load(counts_ptr + entry, mask=is_used, other=1).to(tl.float64)
        probs = _law(tl.where(is_used, tl.log(counts), NEGATIVE), s, most, heat, top_k, top_p, min_p)
        place = (row * steps + i) * most + s
        tl.store(ids_ptr + place, ids, mask=s < most)
        tl.store(probs_ptr + place, probs.to(tl.float32), mask=s < most)
        running = tl.cumsum(probs, 0)
        goal = tl.load(uniforms_ptr + row * steps + i) * tl.max(running, axis=0)
        # Lanes add in orders of their own, so sums may grow over entries of probability 0, which come last.
        last = tl.sum((probs > 0).to(tl.int32), axis=0) - 1
        drawn = tl.minimum(tl.sum((running <= goal).to(tl.int32), axis=0), last)
        token = tl.sum(tl.where(s == drawn, ids, 0), axis=0)
        tl.store(out_ptr + row * steps + i, token)
        context = tl.where(order > 1, token + 1 + (vocab_size + 1) * (context % last_power), 0)
