"""How attention over ragged rows is cut into programs: the form, the blocks, the chunks; no device is asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import triton
from torch import Tensor

from forerun.kernels.attention.device import TURN
from forerun.kernels.launching import multiprocessors, starts_early
from forerun.math.attention import Form
from forerun.math.ragged_attention import Reach

MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """Every number that was chosen by measuring."""

    block_bytes: int = 16384  # of keys, and as many of values, that a program works on at a time
    stages: int = 3  # such blocks on their way from memory
    warps: int = 4
    most_queries: int = 64  # queries of one program; a longer block is cut, and its keys are read again
    resident: int = 2  # programs that a multiprocessor runs at once: what such blocks leave of its shared memory
    most_chunk: int = 1024  # keys of a chunk: one program alone reads 64 in 1.2 us
    merging: int = 256  # keys that one program reads while chunks are merged, and as many more for 64 queries
    early: bool = True  # what follows starts while chunks are still read, where the device can


TUNING = AttentionTuning()
# Programs a multiprocessor: from FULL on nearly none is idle, from CROWDED on each has several.
FULL, CROWDED = 0.9, 3.0
LONG = 2048  # keys from which on a row that outlasts the others is worth cutting


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What one launch looks like: all from shapes and host bounds, nothing from the device."""

    form: Form  # PAD, SPLIT or KEYS
    block_queries: int
    block_keys: int
    query_blocks: int  # a row
    queries: int  # of a block, those that may exist
    splits: int  # programs that share a row's keys
    chunk: int  # keys of each of them
    # Programs among which a key head's keys of all rows are divided evenly; 0: rows have chunks. Not where only the
    # device knows how long rows are: in a recording a row's numbers must not depend on the others' lengths.
    balanced_splits: int
    pieces: int  # of a row, at most
    block_rows: int  # a power of two, no less than rows, where splits are balanced
    early: bool = False  # whether what follows starts while chunks are still read

    @property
    def is_cut(self) -> bool:
        """Whether a row may be read by several programs, so that what they leave must be merged."""
        return self.balanced_splits > 0 or self.splits > 1


def choose_shape(
    query: Tensor, keys: Tensor, reach: Reach, form: Form, tuning: AttentionTuning = TUNING
) -> LaunchShape:
    """Blocks and chunks of one launch; for `auto` the form as well."""
    heads, size = keys.shape[1], power(query.shape[-1])
    wanted = reach.most_tokens * (query.shape[1] // heads)
    # Without tensor cores a product of float32 is so much code that a large block takes long to compile.
    block_queries = min(power(wanted), tuning.most_queries, 32 if query.dtype is torch.float32 else 64)
    block_keys = min(max(tuning.block_bytes // (size * query.element_size()), 16), 128)
    blocks = -(-wanted // block_queries)
    rows, span = reach.slots.shape[0], reach.longest if form is Form.PAD else _span(reach, block_keys)
    places = tuning.resident * multiprocessors(query.device) / (heads * blocks)
    chunk = span
    if form in (Form.AUTO, Form.KEYS):
        chunk = choose_chunk(places, span, reach, block_keys, tuning)
    if form is Form.AUTO:
        filling = heads * rows * blocks / multiprocessors(query.device)
        saved = span - chunk - tuning.merging * (1 + wanted / 64)
        form = choose_form(filling, span, reach.is_even, saved)
    span = reach.longest if form is Form.PAD else span
    if form is Form.KEYS:
        chunk = min(chunk, max(span - 1, 1))  # two chunks at least, whatever is gained by it
    chunk = -(-(chunk if form is Form.KEYS else span) // block_keys) * block_keys
    splits = pieces = -(-span // chunk)
    balanced_splits = 0
    if form is Form.KEYS and blocks == 1 and reach.is_even is False:
        balanced_splits, pieces = choose_balanced_splits(places, span, reach, block_keys)
    early = tuning.early and starts_early(query.device)
    queries, block_rows = min(wanted, block_queries), max(32, power(rows) if balanced_splits else 32)
    return LaunchShape(
        form, block_queries, block_keys, blocks, queries, splits, chunk, balanced_splits, pieces, block_rows, early
    )


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


def choose_chunk(places: float, span: int, reach: Reach, block_keys: int, tuning: AttentionTuning = TUNING) -> int:
    """Keys of a chunk: all chunks run at once, or in as few rounds as keep them short.

    `places` are chunks that the device runs at once for each key head. A last round that is nearly empty takes as long
    as a full one.
    """
    rows = reach.slots.shape[0]
    keys = rows * span if reach.num_keys is None else min(reach.num_keys, rows * span)
    rounds = ceil(keys / tuning.most_chunk / places)
    chunk = max(keys / (rounds * places), span / MOST_SPLITS)
    return -(-ceil(chunk) // block_keys) * block_keys


def choose_balanced_splits(places: float, span: int, reach: Reach, block_keys: int) -> tuple[int, int]:
    """Splits of all rows' keys, as many as there are places and no more than key blocks; of a row, at most so many."""
    num_blocks = (reach.num_keys or 0) / block_keys
    balanced_splits = max(min(int(places), int(num_blocks) + reach.slots.shape[0]), 1)
    return balanced_splits, min(
        balanced_splits, ceil((span / block_keys + TURN.value) / max(num_blocks / balanced_splits, 1)) + 1
    )


def _span(reach: Reach, block_keys: int) -> int:
    """Keys that are read for the queries of one row, at most. In blocks, a window begins with a whole tile."""
    if not reach.window:
        return reach.longest
    return min(reach.longest, reach.window + reach.most_tokens + (0 if reach.table is None else block_keys))


def power(number: int) -> int:
    """The least power of two that is no smaller, and no smaller than 16 where a product needs it."""
    return max(16, triton.next_power_of_2(number))
