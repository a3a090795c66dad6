"""The small steps between the large ones of a device round, each in one launch; the reference is `math.advance`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.math.advance import HEAD, DeviceRowState, PassLayout
from forerun.types import Verdict

FIRST = tl.constexpr(HEAD)
SMALLEST = 64  # rows or tokens that a variant is compiled for, two for each thread of a warp
# A round's numbers and where they lie change from shape to shape; steps this small gain nothing by knowing them.
STRIDES = ("kept_stride", "following_stride", "finite_stride", "block_stride", "result_stride", "width")
COLUMNS = (
    "past_ptr", "round_ptr", "position_ptr", "active_ptr", "block_ptr", "result_ptr", "drafted_ptr", "kept_ptr",
    "following_ptr", "finite_ptr", "asked_ptr", "budget_ptr", "out_ptr", "slots_ptr", "positions_ptr", "addresses_ptr",
    "ends_ptr", "own_ptr",
)  # fmt: skip


def advance(
    state: DeviceRowState, drafted: Tensor, verdict: Verdict, vocab_size: int, counts: Tensor | None = None
) -> None:
    """Write down what became of `drafted` [R] tokens a row, and move every row to the end of what it gained."""
    block, result = state.block, state.result
    kept, following, finite = verdict.num_accepted, verdict.next_token, verdict.finite
    _advance_kernel[(block.shape[0],)](
        state.past, state.round, state.position, state.active, block, result, drafted,
        kept, following, finite, kept.stride(0), following.stride(0), finite.stride(0),
        block.stride(0), result.stride(0), block.shape[1], vocab_size, drafted if counts is None else counts,
        COUNTED=counts is not None, BLOCK=triton.next_power_of_2(block.shape[1]), num_warps=1,
    )  # fmt: skip


def draft_lengths(asked: Tensor, budget: Tensor, position: Tensor, most: int) -> Tensor:
    """[R] what was asked for, at most `most`, where the row's budget has room for it and the token behind it."""
    out = torch.empty_like(asked)
    number = asked.shape[0]
    _lengths_kernel[(1,)](asked, budget, position, out, most, number, BLOCK=_block(number), num_warps=1)
    return out


def lay_out(
    slots: Tensor, past: Tensor, count: int, number: int, capacity: int, limit: int, table: Tensor | None = None
) -> PassLayout:
    """`number` passes of `count` tokens a row behind `past` [R] keys, each pass one token further on."""
    rows = slots.shape[0]
    positions, addresses = slots.new_empty(2, number, rows * count)
    ends = slots.new_empty(number, rows, dtype=torch.int32)
    row_slots = slots.new_empty(rows, dtype=torch.int32)
    _layout_kernel[(number, rows)](
        slots, past, positions, addresses, ends, row_slots, slots if table is None else table, rows, count, capacity,
        limit, 0 if table is None else table.shape[1], BLOCK=_block(count), PAGED=table is not None,
        num_warps=1,
    )  # fmt: skip
    return PassLayout(positions, addresses, ends, row_slots)


def _block(number: int) -> int:
    return max(SMALLEST, triton.next_power_of_2(number))


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=COLUMNS)
def _advance_kernel(
    past_ptr, round_ptr, position_ptr, active_ptr,  # [R] int64, changed
    block_ptr,  # [R, 1 + W] int64, changed
    result_ptr,  # [R, HEAD + W - 1] int64, out
    drafted_ptr, kept_ptr, following_ptr,  # [R] int64
    finite_ptr,  # [R] bool
    kept_stride, following_stride, finite_stride, block_stride, result_stride, width, vocab_size,
    counts_ptr,  # [R, V] int32, changed; where COUNTED
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_ptr + row * kept_stride)
    following = tl.load(following_ptr + row * following_stride)
    following = tl.minimum(tl.maximum(following, 0), vocab_size - 1)
    i = tl.arange(0, BLOCK)
    block = block_ptr + row * block_stride
    tokens = tl.load(block + i, mask=i < width, other=0)
    result = result_ptr + row * result_stride
    tl.store(result, kept)
    tl.store(result + 1, following)
    tl.store(result + 2, tl.load(finite_ptr + row * finite_stride).to(tl.int64))
    tl.store(result + 3, tl.load(drafted_ptr + row))
    tl.store(result + FIRST + i - 2, tokens, mask=(i >= 2) & (i < width))
    tl.store(block, tl.sum(tl.where(i == kept + 1, tokens, 0), axis=0))
    tl.store(block + 1, following)
    active = tl.load(active_ptr + row)
    gained = (kept + 1) * active
    if COUNTED:
        counts = counts_ptr + row * vocab_size
        accepted = (i >= 2) & (i < kept + 2) & (active > 0)
        tl.atomic_add(counts + tokens, tl.full(tokens.shape, 2, tl.int32), mask=accepted)
        tl.atomic_add(counts + following, (2 * active).to(tl.int32))
    tl.store(past_ptr + row, tl.load(past_ptr + row) + gained)
    tl.store(position_ptr + row, tl.load(position_ptr + row) + gained)
    tl.store(round_ptr + row, tl.load(round_ptr + row) + active)


@triton.jit(do_not_specialize=("most", "number"), do_not_specialize_on_alignment=COLUMNS)
def _lengths_kernel(asked_ptr, budget_ptr, position_ptr, out_ptr, most, number, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    there = row < number
    asked = tl.minimum(tl.load(asked_ptr + row, mask=there, other=0), most)
    left = tl.load(budget_ptr + row, mask=there, other=0) - tl.load(position_ptr + row, mask=there, other=0) - 1
    tl.store(out_ptr + row, tl.maximum(tl.minimum(asked, left), 0), mask=there)


@triton.jit(do_not_specialize=("rows", "count"), do_not_specialize_on_alignment=COLUMNS)
def _layout_kernel(
    slots_ptr, past_ptr,  # [R] int64
    positions_ptr, addresses_ptr,  # [S, R * T] int64, out
    ends_ptr,  # [S, R] int32, out
    own_ptr,  # [R] int32, out
    table_ptr,  # [slots, width] int32
    rows, count, capacity, limit, width,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """One program a (pass, row)."""
    step, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot, first = tl.load(slots_ptr + row), tl.load(past_ptr + row) + step
    i = tl.arange(0, BLOCK)
    place, there = first + i, i < count
    out = (step * rows + row) * count + i
    tl.store(positions_ptr + out, tl.maximum(tl.minimum(place, limit - 1), 0), mask=there)
    if PAGED:
        is_row = there & (place >= 0) & (place < width * capacity)
        block = tl.load(table_ptr + slot * width + place // capacity, mask=is_row, other=0).to(tl.int64)
        inner = place % capacity  # of the sign that `place` has: a long draft of a short row begins far before it
        address = block * capacity + tl.where(inner < 0, inner + capacity, inner)
    else:
        address = slot * capacity + tl.where(place < 0, capacity - 1, place)
    tl.store(addresses_ptr + out, address, mask=there)
    tl.store(ends_ptr + step * rows + row, (first + count).to(tl.int32))
    tl.store(own_ptr + row, slot.to(tl.int32))
