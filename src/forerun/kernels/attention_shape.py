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
    programs_per_sm: int = 8  # so many chunks a multiprocessor even out rows of different lengths
    least_chunk: int = 256  # keys below which reading no longer hides a program's start and the merging
    early: bool = True  # kernels start while the one before them ends, and then wait for it, where the device can
    least_gain: int = 8  # reading of a chunk over that of its results, unless most multiprocessors are idle


TUNING = Tuning()
# Programs a multiprocessor: below EMPTY most are idle, from FULL on nearly none, and from CROWDED on each has several.
EMPTY, FULL, CROWDED = 0.25, 0.9, 3.0
LONG = 1024  # keys from which on a row that outlasts the others is worth cutting


@dataclass(frozen=True, slots=True)
class Shape:
    """What one launch looks like: all from shapes and host bounds, nothing from the device."""

    form: Form  # PAD, SPLIT or KEYS
    block_queries: int
    block_keys: int
    query_blocks: int  # a row
    splits: int  # programs that share a row's keys
    chunk: int  # keys of each of them
    early: bool = False  # whether kernels start while the one before them ends


def choose_shape(query: Tensor, keys: Tensor, reach: Reach, form: Form, tuning: Tuning = TUNING) -> Shape:
    """Blocks and chunks of one launch; for `auto` the form as well."""
    heads, size = keys.shape[1], power(query.shape[-1])
    wanted = reach.most_tokens * (query.shape[1] // heads)
    # Without tensor cores a product of float32 is so much code that a large block takes long to compile.
    block_queries = min(power(wanted), tuning.most_queries, 32 if query.dtype is torch.float32 else 64)
    block_keys = min(max(tuning.block_bytes // (size * query.element_size()), 16), 128)
    blocks = -(-wanted // block_queries)
    filling = heads * reach.slots.shape[0] * blocks / multiprocessors(query.device)
    # A chunk writes float32 results that the merging reads: as many bytes as so many keys and values.
    merging = 4 * wanted // query.element_size()
    splits, span = 1, reach.longest if form is Form.PAD else _span(reach)
    if form in (Form.AUTO, Form.KEYS):
        splits = choose_splits(filling, span, merging, form is Form.KEYS, tuning)
    if form is Form.AUTO:
        form = choose_form(filling, span, reach.is_even, splits)
        splits = splits if form is Form.KEYS else 1
    span = reach.longest if form is Form.PAD else span
    chunk = -(-span // (splits * block_keys)) * block_keys
    splits = -(-span // chunk)
    early = tuning.early and starts_early(query.device)
    return Shape(form, block_queries, block_keys, blocks, splits, chunk, early)


def choose_form(filling: float, span: int, is_even: bool | None, splits: int) -> Form:
    """KEYS where multiprocessors would be idle: too few programs, or one row that outlasts the others.

    `filling` is programs a multiprocessor if no row is cut. With even rows and many programs PAD is ahead of SPLIT,
    whose programs read their lengths first.
    """
    is_full = filling >= FULL
    if is_full and (is_even or (is_even is None and span < LONG)):
        return Form.PAD if is_even and filling >= CROWDED else Form.SPLIT
    if splits < 2 or (is_full and span < LONG):
        return Form.SPLIT
    return Form.KEYS


def choose_splits(filling: float, span: int, merging: int, forced: bool, tuning: Tuning = TUNING) -> int:
    """Into how many chunks the longest row is cut: enough to go round, none shorter than is worth a program."""
    enough = ceil(tuning.programs_per_sm / filling)
    least = tuning.least_chunk if filling < EMPTY else max(tuning.least_chunk, tuning.least_gain * merging)
    return max(2 if forced else 1, min(enough, span // least, MOST_SPLITS))


def _span(reach: Reach) -> int:
    """Keys that the queries of one row may see, at most."""
    return min(reach.longest, reach.window + reach.most_tokens) if reach.window else reach.longest


def power(number: int) -> int:
    """The least power of two that is no smaller, and no smaller than 16 where a product needs it."""
    return max(16, triton.next_power_of_2(number))
