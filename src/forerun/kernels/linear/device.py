"""Device code of `project`: one kernel for a single row, one on tensor cores for some, and what both end with.

Outputs are numbered by p. What becomes of the sums is the kernel's END: PLAIN stores them, activated; GATED has a
second weight row for each output (N further on) and stores activated(first) * second; ROTATED has the two dimensions of
a head that turn together, and stores queries to `out`, keys and values to the cache.

How weights are stored is the kernel's FORM, see `linear.widen`: narrow ones are widened where they arrive, or
multiplied as they are where the rows are rounded, too.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from forerun.kernels.attention.cache_write import pair_of
from forerun.kernels.linear.activation import activated
from forerun.kernels.linear.rounding import inverse_of, narrowed, rounded_to, scale_of
from forerun.kernels.linear.widen import INT4, INT8, ROUNDED, WIDE, lifted, lifted_nibbles, nibbles, pairs

PLAIN = tl.constexpr(0)
GATED = tl.constexpr(1)
ROTATED = tl.constexpr(2)
BYTES = tl.constexpr(16)  # that a thread reads at once
MOST_AT_ONCE = tl.constexpr(4096)  # numbers of a row that a program reads to find its scale
# A whole number n in the last bits of a float is n * 2**-149: nothing has to be converted. The row it is multiplied by
# is enlarged, the sum as well; what made all numbers positive is taken off as a multiple of the row's sum.
MORE, LESS = tl.constexpr(2.0**90), tl.constexpr(2.0**59)
# What changes from pass to pass must not have a kernel compiled anew.
UNALIGNED = ("cos_ptr", "sin_ptr", "addresses_ptr")


class ProductCase(NamedTuple):
    """What is known of a product when its kernel is compiled."""

    FORM: int
    GROUP: int  # inputs that share a scale, where FORM is INT4
    FAST: bool  # whether assembly widens and rounds
    END: int
    ACTIVATION: int
    HEADS: int
    KEY_HEADS: int
    SIZE: int  # of a head
    TURNING: int  # dimensions of it that are rotated
    INTERLEAVED: bool
    HAS_ORDER: bool
    BLOCK_N: int
    BLOCK_K: int
    HAS_BIAS: bool
    HAS_RESIDUAL: bool
    EARLY: bool
    STAGES: int = 1  # these of `vector_kernel` alone
    HAS_NORM: bool = False
    NORM_WIDE: bool = False
    LARGEST: float = 0.0
    ROWS: int = 1  # these of `tile_kernel` alone
    SPLITS: int = 1
    UPCAST: bool = False


class ProductOutputs(NamedTuple):
    """What is added to sums, and where they go."""

    out_ptr: Any
    bias_ptr: Any
    residual_ptr: Any
    multiplier: Any
    cos_ptr: Any
    sin_ptr: Any
    cos_row: Any
    addresses_ptr: Any
    key_pool_ptr: Any
    value_pool_ptr: Any


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def vector_kernel(
    out_ptr,  # [1, N], for ROTATED [1, Hq, D]
    x_ptr,  # [1, K]
    w_ptr,  # [N, K] or [2 N, K]; of four bits [.., K / 2]
    scale_ptr,  # as many as weight rows, for four bits [.., K / GROUP]
    row_scale_ptr,  # [R] float32, where FORM is ROUNDED
    bias_ptr,  # as many as weight rows
    residual_ptr,  # [1, N]
    cos_ptr,  # [1, TURNING]
    sin_ptr,  # [1, TURNING]
    addresses_ptr,  # [1] int64
    key_pool_ptr,  # [slots * capacity, Hk, D]
    value_pool_ptr,  # [slots * capacity, Hk, D]
    order_ptr,  # [Hq + 2 Hk] int32
    gain_ptr,  # [K]
    N, K, cos_row, multiplier, epsilon, offset,
    CASE: tl.constexpr,
):  # fmt: skip
    """One program per few outputs: every weight is multiplied where it arrives.

    Where LARGEST is not 0 the row is rounded here: every program finds its scale for itself, in less time than another
    launch would take.
    """
    p = tl.program_id(0) * CASE.BLOCK_N + tl.arange(0, CASE.BLOCK_N)
    first_row, second_row = weight_rows(tl.minimum(p, N - 1), N, order_ptr, CASE)
    if CASE.EARLY:
        tl.extra.cuda.gdc_wait()
    first, second = row_sums(
        x_ptr, w_ptr, scale_ptr, row_scale_ptr, gain_ptr, first_row, second_row, K, epsilon, offset, CASE
    )
    if CASE.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    outputs = ProductOutputs(
        out_ptr, bias_ptr, residual_ptr, multiplier, cos_ptr, sin_ptr, cos_row, addresses_ptr, key_pool_ptr,
        value_pool_ptr,
    )  # fmt: skip
    finish(first[None, :], second[None, :], first_row, second_row, tl.arange(0, 1), p, 1, N, outputs, CASE)


@triton.jit
def row_sums(
    x_ptr, w_ptr, scale_ptr, row_scale_ptr, gain_ptr, first_row, second_row, K, epsilon, offset, CASE: tl.constexpr
):
    """One row's products [BLOCK_N] with weight rows `first_row` and, unless END is PLAIN, `second_row`."""
    shrink = 1.0
    row_scale = 1.0
    if CASE.LARGEST > 0:
        shrink, row_scale = scales_of_row(x_ptr, gain_ptr, K, epsilon, offset, CASE)
    elif CASE.FORM == ROUNDED:
        row_scale = tl.load(row_scale_ptr)
    if CASE.FORM == INT4:
        first, second, squares = packed_sums(x_ptr, w_ptr, scale_ptr, gain_ptr, first_row, second_row, K, offset, CASE)
    else:
        EACH: tl.constexpr = 1 if CASE.FORM == WIDE else BYTES
        total = tl.full([CASE.BLOCK_N, CASE.BLOCK_K // EACH], 0.0, dtype=tl.float32)
        other_total = tl.full([CASE.BLOCK_N, CASE.BLOCK_K // EACH], 0.0, dtype=tl.float32)
        square_sums = tl.full([CASE.BLOCK_K], 0.0, dtype=tl.float32)
        inverse = inverse_of(row_scale) if CASE.LARGEST > 0 else 1.0
        for begin in tl.range(0, K, CASE.BLOCK_K, num_stages=CASE.STAGES):
            k = begin + tl.arange(0, CASE.BLOCK_K)
            there = k < K
            place = w_ptr + first_row[:, None] * K + k[None, :]
            w = tl.load(place, mask=there[None, :], other=0.0, eviction_policy="evict_first")
            if CASE.LARGEST > 0:
                x = part_of_row(x_ptr, gain_ptr, k, there, shrink, offset, CASE)
                x = narrowed(x, row_scale, inverse, CASE.LARGEST, w_ptr.dtype.element_ty, CASE.FAST).to(tl.float32)
            else:
                x = tl.load(x_ptr + k, mask=there, other=0.0).to(tl.float32)
                if CASE.HAS_NORM:
                    square_sums += x * x
                    x = x * (tl.load(gain_ptr + k, mask=there, other=0.0).to(tl.float32) + offset)
            x_sums = 0.0
            if w_ptr.dtype.element_ty == tl.int8:
                x_sums = add_products(
                    tl.full([1, CASE.BLOCK_K // EACH], 0.0, dtype=tl.float32), x[None, :] * 128.0, EACH
                )
                x *= MORE
            total = add_tile(total, w, x, x_sums, EACH, CASE.FAST)
            if CASE.END != PLAIN:
                place = w_ptr + second_row[:, None] * K + k[None, :]
                w = tl.load(place, mask=there[None, :], other=0.0, eviction_policy="evict_first")
                other_total = add_tile(other_total, w, x, x_sums, EACH, CASE.FAST)
        first, second, squares = tl.sum(total, 1), tl.sum(other_total, 1), tl.sum(square_sums, 0)
        if CASE.FORM != WIDE:
            first *= tl.load(scale_ptr + first_row).to(tl.float32) * row_scale
            if CASE.END != PLAIN:
                second *= tl.load(scale_ptr + second_row).to(tl.float32) * row_scale
    if CASE.HAS_NORM and CASE.LARGEST == 0:
        shrink = 1.0 / tl.sqrt(squares / K + epsilon)
        first *= shrink
        second *= shrink
    return first, second


@triton.jit(do_not_specialize=("R",), do_not_specialize_on_alignment=UNALIGNED)
def tile_kernel(
    out_ptr,  # [R, N], for ROTATED [R, Hq, D]
    x_ptr,  # [R, K]
    w_ptr,  # [N, K] or [2 N, K]; of four bits [.., K / 2]
    scale_ptr,  # as many as weight rows, for four bits [.., K / GROUP]
    row_scale_ptr,  # [R] float32, where FORM is ROUNDED
    bias_ptr,  # as many as weight rows
    residual_ptr,  # [R, N]
    cos_ptr,  # [R, TURNING]
    sin_ptr,  # [R, TURNING]
    addresses_ptr,  # [R] int64
    key_pool_ptr,  # [slots * capacity, Hk, D]
    value_pool_ptr,  # [slots * capacity, Hk, D]
    order_ptr,  # [Hq + 2 Hk] int32
    part_ptr,  # [S, R, N] float32, for PLAIN with several splits
    count_ptr,  # [tiles] int32, zeros before and after
    R, N, K, chunk, cos_row, multiplier,
    CASE: tl.constexpr,
):  # fmt: skip
    """One program per (tile of outputs, part of each sum). Weights are the left side: tensor cores take more there."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    p = tile * CASE.BLOCK_N + tl.arange(0, CASE.BLOCK_N)
    r = tl.arange(0, CASE.ROWS)
    start = split * chunk
    end = tl.minimum(start + chunk, K)
    first_row, second_row = weight_rows(tl.minimum(p, N - 1), N, order_ptr, CASE)
    if CASE.EARLY:
        tl.extra.cuda.gdc_wait()
    SUMS: tl.constexpr = tl.int32 if CASE.FORM == ROUNDED and x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.full([CASE.BLOCK_N, CASE.ROWS], 0, dtype=SUMS)
    other_total = tl.full([CASE.BLOCK_N, CASE.ROWS], 0, dtype=SUMS)
    # Scales of four bits are looked up one tile ahead: nothing would fetch them early by itself.
    scales = scales_of(scale_ptr, first_row, start, end, K, CASE.FORM == INT4, CASE)
    other_scales = scales_of(scale_ptr, second_row, start, end, K, CASE.FORM == INT4 and CASE.END != PLAIN, CASE)
    for begin in range(start, end, CASE.BLOCK_K):
        if CASE.FORM == INT4:
            following = scales_of(scale_ptr, first_row, begin + CASE.BLOCK_K, end, K, True, CASE)
            if CASE.END != PLAIN:
                others = scales_of(scale_ptr, second_row, begin + CASE.BLOCK_K, end, K, True, CASE)
            total = add_packed(total, x_ptr, w_ptr, scales, first_row, r, R, begin, end, K, CASE)
            scales = following
            if CASE.END != PLAIN:
                other_total = add_packed(other_total, x_ptr, w_ptr, other_scales, second_row, r, R, begin, end, K, CASE)
                other_scales = others
        else:
            k = begin + tl.arange(0, CASE.BLOCK_K)
            # Whole numbers that are widened come in pairs, low and high byte of sixteen bits: see `widen.pairs`.
            EACH: tl.constexpr = 2 if CASE.FORM == INT8 else 1
            i = begin // EACH + tl.arange(0, CASE.BLOCK_K // EACH)
            is_weight = (i < end // EACH)[None, :]
            place = w_ptr + first_row[:, None] * (K // EACH) + i[None, :]
            w = tl.load(place, mask=is_weight, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & (k < end)[None, :], other=0.0)
            if CASE.UPCAST:
                x = x.to(tl.float32)
            total = add_product(total, w, x, CASE.FORM, CASE.FAST)
            if CASE.END != PLAIN:
                place = w_ptr + second_row[:, None] * (K // EACH) + i[None, :]
                w = tl.load(place, mask=is_weight, other=0.0, eviction_policy="evict_first")
                other_total = add_product(other_total, w, x, CASE.FORM, CASE.FAST)
    if CASE.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.trans(total).to(tl.float32)  # [ROWS, BLOCK_N]
    second = tl.trans(other_total).to(tl.float32)
    if CASE.SPLITS > 1:
        # The last program to arrive adds up what all have left, always in the same order.
        place = r[:, None] * N + p[None, :]
        is_out = (r < R)[:, None] & (p < N)[None, :]
        tl.store(part_ptr + split * R * N + place, first, mask=is_out)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") != CASE.SPLITS - 1:
            return
        first = tl.full([CASE.ROWS, CASE.BLOCK_N], 0.0, dtype=tl.float32)
        SPLITS: tl.constexpr = CASE.SPLITS
        for other in tl.static_range(SPLITS):
            first += tl.load(part_ptr + other * R * N + place, mask=is_out, other=0.0, cache_modifier=".cg")
        tl.store(count_ptr + tile, 0)
    if CASE.FORM == INT8 or CASE.FORM == ROUNDED:
        first *= tl.load(scale_ptr + first_row).to(tl.float32)[None, :]
        if CASE.END != PLAIN:
            second *= tl.load(scale_ptr + second_row).to(tl.float32)[None, :]
    if CASE.FORM == ROUNDED:
        row_scales = tl.load(row_scale_ptr + r, mask=r < R, other=0.0)[:, None]
        first *= row_scales
        second *= row_scales
    outputs = ProductOutputs(
        out_ptr, bias_ptr, residual_ptr, multiplier, cos_ptr, sin_ptr, cos_row, addresses_ptr, key_pool_ptr,
        value_pool_ptr,
    )  # fmt: skip
    finish(first, second, first_row, second_row, r, p, R, N, outputs, CASE)


@triton.jit
def scales_of_row(x_ptr, gain_ptr, K, epsilon, offset, CASE: tl.constexpr):
    """What the norm shrinks a row by, and the scale it is rounded with after that."""
    i = tl.arange(0, MOST_AT_ONCE)
    shrink = 1.0
    if CASE.HAS_NORM:
        squares = tl.zeros([MOST_AT_ONCE], dtype=tl.float32)
        for begin in range(0, K, MOST_AT_ONCE):
            x = tl.load(x_ptr + begin + i, mask=begin + i < K, other=0.0).to(tl.float32)
            squares += x * x
        shrink = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + epsilon)
    peaks = tl.zeros([MOST_AT_ONCE], dtype=tl.float32)
    odd = tl.zeros([MOST_AT_ONCE], dtype=tl.int32)
    for begin in range(0, K, MOST_AT_ONCE):
        x = part_of_row(x_ptr, gain_ptr, begin + i, begin + i < K, shrink, offset, CASE)
        peaks = tl.maximum(peaks, tl.abs(x))
        odd = odd | (x != x).to(tl.int32)
    return shrink, scale_of(tl.max(peaks, 0), tl.max(odd, 0), CASE.LARGEST)


@triton.jit
def part_of_row(x_ptr, gain_ptr, k, there, shrink, offset, CASE: tl.constexpr):
    """Numbers k of a row, normed and rounded to its type as `norms.norm_kernel` does it, as float32."""
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + k, mask=there, other=0.0).to(tl.float32)
    if CASE.HAS_NORM:
        gain = tl.load(gain_ptr + k, mask=there, other=0.0).to(tl.float32) + offset
        x = x * shrink
        if not CASE.NORM_WIDE:
            x = rounded_to(x, KIND, CASE.FAST)
        x = rounded_to(x * gain, KIND, CASE.FAST)
    return x


@triton.jit
def add_products(total, products, EACH: tl.constexpr):
    """total [.., BLOCK_K / EACH] + products [.., BLOCK_K]: what one thread has read is added up first."""
    if EACH > 1:
        products = tl.sum(tl.reshape(products, total.shape + [EACH]), len(total.shape))
    return total + products


@triton.jit
def add_tile(total, w, x, x_sums, EACH: tl.constexpr, FAST: tl.constexpr):
    """total [BLOCK_N, BLOCK_K / EACH] + w * x, each thread's own numbers added up. Whole numbers take x enlarged."""
    if w.dtype == tl.int8:
        products = add_products(tl.zeros_like(total), lifted(w, FAST) * x[None, :], EACH)
        total += products * LESS - x_sums
    else:
        total = add_products(total, w.to(tl.float32) * x[None, :], EACH)
    return total


@triton.jit
def add_product(total, w, x, FORM: tl.constexpr, FAST: tl.constexpr):
    """total [BLOCK_N, ROWS] + w [BLOCK_N, BLOCK_K] @ x.T, whose rows may have become float32."""
    if FORM == INT8:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        low, high = pairs(w, x.dtype, False, FAST)
        total = tl.dot(low, tl.trans(even), total, input_precision="ieee")
        total = tl.dot(high, tl.trans(odd), total, input_precision="ieee")
    elif FORM != ROUNDED:
        total = tl.dot(w.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    elif x.dtype == tl.int8:
        total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
    else:
        # Hopper's sums of 8-bit products keep 14 bits: a few of them at a time, then float32.
        FEW: tl.constexpr = 128 if x.shape[1] > 128 else x.shape[1]
        total = tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=FEW)
    return total


@triton.jit
def scales_of(scale_ptr, rows, first, end, K, ARE_THERE: tl.constexpr, CASE: tl.constexpr):
    """Of the groups of a tile from input `first` on: [BLOCK_N, groups] float32."""
    if ARE_THERE:
        group = first // CASE.GROUP + tl.arange(0, CASE.BLOCK_K // CASE.GROUP)
        place = scale_ptr + rows[:, None] * (K // CASE.GROUP) + group[None, :]
        scales = tl.load(place, mask=(group * CASE.GROUP < end)[None, :], other=0.0).to(tl.float32)
    else:
        scales = 0.0
    return scales


@triton.jit
def add_packed(total, x_ptr, w_ptr, scales, rows, r, R, begin, end, K, CASE: tl.constexpr):
    """The same for weights of four bits: a group is summed, then scaled."""
    HALF: tl.constexpr = CASE.GROUP // 2
    PARTS: tl.constexpr = CASE.BLOCK_K // CASE.GROUP
    i = tl.arange(0, HALF)
    for part in tl.static_range(PARTS):
        first = begin + part * CASE.GROUP
        is_in = first < end
        raw = tl.load(
            w_ptr + rows[:, None] * (K // 2) + (first // 2 + i)[None, :], mask=is_in, other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        place = x_ptr + r[:, None] * K + (first + i)[None, :]
        is_x = (r < R)[:, None] & is_in
        low_x = tl.load(place, mask=is_x, other=0.0)
        high_x = tl.load(place + HALF, mask=is_x, other=0.0)
        if CASE.UPCAST:
            low_x = low_x.to(tl.float32)
            high_x = high_x.to(tl.float32)
        low, high = nibbles(raw, low_x.dtype, CASE.FAST)
        sums = tl.dot(low, tl.trans(low_x), input_precision="ieee")
        sums = tl.dot(high, tl.trans(high_x), sums, input_precision="ieee")
        is_part = tl.arange(0, PARTS) == part
        total += sums * tl.sum(tl.where(is_part[None, :], scales, 0.0), 1)[:, None]
    return total


@triton.jit
def packed_sums(x_ptr, w_ptr, scale_ptr, gain_ptr, first_row, second_row, K, offset, CASE: tl.constexpr):
    """Sums [BLOCK_N] of one row with weights of four bits, and of the row's squares. A thread's bytes share a scale."""
    HALF: tl.constexpr = CASE.GROUP // 2
    COLUMNS: tl.constexpr = CASE.BLOCK_K // 2
    width = tl.multiple_of(K // 2, BYTES)  # a group has at least 32 numbers
    i = tl.arange(0, COLUMNS)
    at = tl.arange(0, COLUMNS // BYTES) * BYTES // HALF  # whose group of scales
    total = tl.full([CASE.BLOCK_N, COLUMNS // BYTES], 0.0, dtype=tl.float32)
    other_total = tl.full([CASE.BLOCK_N, COLUMNS // BYTES], 0.0, dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    # Scales are looked up one tile ahead: nothing would fetch them early by itself.
    scales = group_scales(scale_ptr, first_row, at, K // CASE.GROUP)
    other_scales = group_scales(scale_ptr, second_row, at, K // CASE.GROUP) if CASE.END != PLAIN else scales
    for begin in tl.range(0, width, COLUMNS, num_stages=CASE.STAGES):
        there = begin + i < width
        k = (begin + i) // HALF * CASE.GROUP + i % HALF
        low_x = tl.load(x_ptr + k, mask=there, other=0.0).to(tl.float32)
        high_x = tl.load(x_ptr + k + HALF, mask=there, other=0.0).to(tl.float32)
        if CASE.HAS_NORM:
            squares += low_x * low_x + high_x * high_x
            low_x *= tl.load(gain_ptr + k, mask=there, other=0.0).to(tl.float32) + offset
            high_x *= tl.load(gain_ptr + k + HALF, mask=there, other=0.0).to(tl.float32) + offset
        x_sums = add_products(tl.zeros([1, COLUMNS // BYTES], dtype=tl.float32), (low_x + high_x)[None, :] * 8.0, BYTES)
        low_x *= MORE
        high_x *= MORE
        place = w_ptr + first_row[:, None] * width + (begin + i)[None, :]
        raw = tl.load(place, mask=there[None, :], other=0, eviction_policy="evict_first")
        following = group_scales(scale_ptr, first_row, at + (begin + COLUMNS) // HALF, K // CASE.GROUP)
        total = add_groups(total, raw, scales, low_x, high_x, x_sums, CASE.FAST)
        scales = following
        if CASE.END != PLAIN:
            place = w_ptr + second_row[:, None] * width + (begin + i)[None, :]
            raw = tl.load(place, mask=there[None, :], other=0, eviction_policy="evict_first")
            following = group_scales(scale_ptr, second_row, at + (begin + COLUMNS) // HALF, K // CASE.GROUP)
            other_total = add_groups(other_total, raw, other_scales, low_x, high_x, x_sums, CASE.FAST)
            other_scales = following
    return tl.sum(total, 1), tl.sum(other_total, 1), tl.sum(squares, 0)


@triton.jit
def group_scales(scale_ptr, rows, group, count):
    """[BLOCK_N, threads' shares of a tile] float32."""
    place = scale_ptr + rows[:, None] * count + group[None, :]
    return tl.load(place, mask=(group < count)[None, :], other=0.0).to(tl.float32)


@triton.jit
def add_groups(total, raw, scales, low_x, high_x, x_sums, FAST: tl.constexpr):
    """total [BLOCK_N, COLUMNS / BYTES] + scaled products of a tile with a row that is enlarged."""
    low, high = lifted_nibbles(raw, FAST)
    products = add_products(tl.zeros_like(total), low * low_x[None, :], BYTES)
    products = add_products(products, high * high_x[None, :], BYTES)
    return total + scales * (products * LESS - x_sums)


@triton.jit
def weight_rows(p, N, order_ptr, CASE: tl.constexpr):
    """The weight rows behind output p: int64, because a weight may have more than 2**31 numbers."""
    if CASE.END == ROTATED:
        HALF: tl.constexpr = CASE.SIZE // 2
        head = p // HALF
        low, high = pair_of(p % HALF, CASE.SIZE, CASE.TURNING, CASE.INTERLEAVED)
        if CASE.HAS_ORDER:
            head = tl.load(order_ptr + head)
        first = (head * CASE.SIZE + low).to(tl.int64)
        second = (head * CASE.SIZE + high).to(tl.int64)
    else:
        first = p.to(tl.int64)
        second = first + N
    return first, second


@triton.jit
def finish(
    first,  # [ROWS, BLOCK_N] float32
    second,
    first_row,  # [BLOCK_N]
    second_row,
    r,  # [ROWS]
    p,  # [BLOCK_N]
    R, N, outputs,
    CASE: tl.constexpr,
):  # fmt: skip
    """What follows the product."""
    is_out = (r < R)[:, None] & (p < N)[None, :]
    if CASE.HAS_BIAS:
        first += tl.load(outputs.bias_ptr + first_row).to(tl.float32)[None, :]
        if CASE.END != PLAIN:
            second += tl.load(outputs.bias_ptr + second_row).to(tl.float32)[None, :]
    if CASE.END == ROTATED:
        store_heads(first, second, r, p, is_out, R, outputs, CASE)
    else:
        first = activated(first, CASE.ACTIVATION)
        if CASE.END == GATED:
            first *= second
        first *= outputs.multiplier
        place = r[:, None] * N + p[None, :]
        if CASE.HAS_RESIDUAL:
            first += tl.load(outputs.residual_ptr + place, mask=is_out, other=0.0).to(tl.float32)
        tl.store(outputs.out_ptr + place, first.to(outputs.out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def store_heads(first, second, r, p, is_out, R, outputs, CASE: tl.constexpr):
    """Queries and keys rotated; queries to `out`, keys and values where their tokens live."""
    HALF: tl.constexpr = CASE.SIZE // 2
    KIND: tl.constexpr = outputs.out_ptr.dtype.element_ty
    head = (p // HALF)[None, :]
    i = (p % HALF)[None, :]
    low, high = pair_of(i, CASE.SIZE, CASE.TURNING, CASE.INTERLEAVED)
    turns = is_out & (head < CASE.HEADS + CASE.KEY_HEADS) & (i < CASE.TURNING // 2)
    angle = r[:, None] * outputs.cos_row + i
    cos = tl.load(outputs.cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(outputs.sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(KIND)
    other = (second * cos + first * sin).to(KIND)
    is_query = is_out & (head < CASE.HEADS)
    place = r[:, None].to(tl.int64) * CASE.HEADS * CASE.SIZE + head * CASE.SIZE
    tl.store(outputs.out_ptr + place + low, turned, mask=is_query)
    tl.store(outputs.out_ptr + place + high, other, mask=is_query)
    address = tl.load(outputs.addresses_ptr + r, mask=r < R, other=0)[:, None]
    place = (address * CASE.KEY_HEADS + head - CASE.HEADS) * CASE.SIZE
    is_key = is_out & (head >= CASE.HEADS) & (head < CASE.HEADS + CASE.KEY_HEADS)
    tl.store(outputs.key_pool_ptr + place + low, turned, mask=is_key)
    tl.store(outputs.key_pool_ptr + place + high, other, mask=is_key)
    place -= CASE.KEY_HEADS * CASE.SIZE
    is_value = is_out & (head >= CASE.HEADS + CASE.KEY_HEADS)
    tl.store(outputs.value_pool_ptr + place + low, turned, mask=is_value)
    tl.store(outputs.value_pool_ptr + place + high, other, mask=is_value)
