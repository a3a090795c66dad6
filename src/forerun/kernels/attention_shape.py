"""How attention over ragged rows is cut into programs: the form, the blocks, the chunks; no device is asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import triton
from torch import Tensor

from forerun.kernels.launching import multiprocessors, starts_early
from forerun.math.attention import Form
from forerun.math.ragged_attention import Reach

MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """Every number that was chosen by measuring."""

    block_bytes: int = 16384  # of keys, and as many of values, that a program works on at a time
    stages: int = 3  # such blocks on their way from memory
    warps: int = 4
    most_queries: int = 64  # queries of one program; a longer block is cut, and its keys are read again
    resident: int = 2  # programs that a multiprocessor runs at once: what such blocks leave of its shared memory
    most_chunk: int = 1024  # keys of a chunk: one program alone reads 64 in 1.2 us
    merging: int = 256  # keys that one program reads while chunks are merged, and as many more for 64 queries
    early: bool = True  # what follows starts while chunks are still read, where the device can


TUNING = Tuning()
# Programs a multiprocessor: from FULL on nearly none is idle, from CROWDED on each has several.
FULL, CROWDED = 0.9, 3.0
LONG = 2048  # keys from which on a row that outlasts the others is worth cutting
PARTLY = 0.75  # of a chunk, the last of a row: as good as a whole one where places are counted


@dataclass(frozen=True, slots=True)
class Shape:
    """What one launch looks like: all from shapes and host bounds, nothing from the device."""

    form: Form  # PAD, SPLIT or KEYS
    block_queries: int
    block_keys: int
    query_blocks: int  # a row
    splits: int  # programs that share a row's keys
    chunk: int  # keys of each of them
    early: bool = False  # whether what follows starts while chunks are still read


def choose_shape(query: Tensor, keys: Tensor, reach: Reach, form: Form, tuning: Tuning = TUNING) -> Shape:
    """Blocks and chunks of one launch; for `auto` the form as well."""
    heads, size = keys.shape[1], power(query.shape[-1])
    wanted = reach.most_tokens * (query.shape[1] // heads)
    # Without tensor cores a product of float32 is so much code that a large block takes long to compile.
    block_queries = min(power(wanted), tuning.most_queries, 32 if query.dtype is torch.float32 else 64)
    block_keys = min(max(tuning.block_bytes // (size * query.element_size()), 16), 128)
    blocks = -(-wanted // block_queries)
    rows, span = reach.slots.shape[0], reach.longest if form is Form.PAD else _span(reach)
    chunk = span
    if form in (Form.AUTO, Form.KEYS):
        places = tuning.resident * multiprocessors(query.device) / (heads * blocks)
        chunk = choose_chunk(places, span, reach, block_keys, tuning)
    if form is Form.AUTO:
        filling = heads * rows * blocks / multiprocessors(query.device)
        saved = span - chunk - tuning.merging * (1 + wanted / 64)
        form = choose_form(filling, span, reach.is_even, saved)
    if form is Form.KEYS:
        chunk = min(chunk, max(span - 1, 1))  # two chunks at least, whatever is gained by it
    span = reach.longest if form is Form.PAD else span
    chunk = -(-(chunk if form is Form.KEYS else span) // block_keys) * block_keys
    early = tuning.early and starts_early(query.device)
    return Shape(form, block_queries, block_keys, blocks, -(-span // chunk), chunk, early)


def choose_form(filling: float, span: int, is_even: bool | None, saved: float) -> Form:
    """KEYS where multiprocessors would be idle: too few programs, or one row that outlasts the others.

    `filling` is programs a multiprocessor if no row is cut, `saved` how many keys fewer the longest row's programs read
    one after the other if it is, merging taken off. With even rows and many programs PAD is ahead of SPLIT, whose
    programs read their lengths first.
    """
    if filling >= FULL:
        if is_even:
            return Form.PAD if filling >= CROWDED else Form.SPLIT
        return Form.KEYS if span >= LONG and saved > 0 else Form.SPLIT
    return Form.KEYS if saved > 0 else Form.SPLIT


def choose_chunk(places: float, span: int, reach: Reach, block_keys: int, tuning: Tuning = TUNING) -> int:
    """Keys of a chunk: all chunks run at once, or in as few rounds as keep them short.

    `places` are chunks that the device runs at once for each key head. A last round that is nearly empty takes as long
    as a full one: eight rows of 64 to 4096 keys in 232 programs take 29 us, in 288 (of 264 places) 34.
    """
    rows = reach.slots.shape[0]
    is_known = reach.num_keys is not None and not reach.window
    keys = reach.num_keys if is_known and reach.num_keys is not None else rows * span
    partly = PARTLY * rows if is_known and not reach.is_even else 0.0
    rounds = ceil((keys / tuning.most_chunk + partly) / places)
    chunk = max(keys / (rounds * places - partly), span / MOST_SPLITS)
    return -(-ceil(chunk) // block_keys) * block_keys


def _span(reach: Reach) -> int:
    """Keys that the queries of one row may see, at most."""
    return min(reach.longest, reach.window + reach.most_tokens) if reach.window else reach.longest


def power(number: int) -> int:
    """The least power of two that is no smaller, and no smaller than 16 where a product needs it."""
    return max(16, triton.next_power_of_2(number))
