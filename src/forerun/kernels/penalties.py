"""Bias and penalties in one launch, at every position of a row; references are `math.penalties`, `math.row_options`.

The references gather and scatter once for each kind of change. Here one program takes one position and a block of ids,
counts how often each was drafted before that position, and applies everything in the references' order: `adjust` for
one row whose history the host knows, `adjust_rows` for all rows of a table that the device advances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.penalties import check_bias, num_emitted
from forerun.math.precision import working
from forerun.math.row_options import NEVER, NOT_EARLY, NOT_FIRST, RowOptions
from forerun.math.transfer import to_device

BLOCK = 256  # ids a program
ALIGNED = 4  # numbers that 16 bytes hold: kernels are compiled anew for addresses that are no multiple of them
ROWS_BLOCK = 1024  # the same where all ids are looked at
# A number a row each, and what lies anywhere inside of a block.
COLUMNS = ("repetition", "presence", "frequency", "min_new_tokens", "position", "drafted", "seen")
BANNED = tl.constexpr(NEVER)
BANNED_FIRST = tl.constexpr(NOT_FIRST)
BANNED_EARLY = tl.constexpr(NOT_EARLY)


def why_not(logits: Tensor) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if logits.dtype == torch.float64 or not len(logits):
        return f"{len(logits)} rows of {logits.dtype}"
    return None


def adjust(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int] | Counter[int],
    drafted: Sequence[int],
    params: SamplingParams,
    forbid: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> Tensor:
    """`math.penalties.adjust` for logits [n, V] of one row; a new float32 tensor."""
    check_bias(params.logit_bias, logits.shape[-1])
    adjusted = working(logits).contiguous().clone()
    positions, vocab = adjusted.shape
    drafted = list(drafted[: positions - 1])
    early = max(min_new_tokens - num_emitted(output), 0)
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        prompt, output, drafted = (), (), []
    before, emitted = Counter(prompt), Counter(output)
    touched = dict.fromkeys((*params.logit_bias, *before, *emitted, *drafted, *(forbid if early else ())))
    ids = [token for token in touched if 0 <= token < vocab]
    if not ids:
        return adjusted
    forbidden = set(forbid)
    unknown = positions - 1 - len(drafted)  # the kernel reads as many as there are positions
    along = [*drafted, *[-1] * (unknown + (-(positions - 1) % ALIGNED or ALIGNED))]
    columns = [
        *ids,
        *(before[token] + emitted[token] for token in ids),
        *(emitted[token] for token in ids),
        *(int(token in forbidden) for token in ids),
    ]
    numbers = torch.tensor([*along, *columns], dtype=torch.int32)
    added = torch.tensor([params.logit_bias.get(token, 0.0) for token in ids]).view(torch.int32)
    sent = to_device(torch.cat([numbers, added]), logits.device)  # in one copy
    table, bias = sent[len(along) :], sent[len(numbers) :].view(torch.float32)
    adjust_kernel[(positions, triton.cdiv(len(ids), BLOCK))](
        adjusted, table, bias, sent, len(ids), vocab, early,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, SIZE=BLOCK,
    )  # fmt: skip
    return adjusted


@triton.jit(do_not_specialize=("num_ids", "early"))
def adjust_kernel(
    logits,  # [n, V] float32, changed in place
    table,  # [4, U] int32: id, times in prompt and output, times in the output, whether it may be forbidden
    bias,  # [U] float32
    drafted,  # [n - 1] int32, and more
    num_ids, vocab,
    early,  # positions at which forbidden ids are cut
    repetition, presence, frequency,
    SIZE: tl.constexpr,
):  # fmt: skip
    """One program a position and SIZE ids."""
    i = tl.program_id(0)
    u = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = u < num_ids
    token = tl.load(table + u, mask=there, other=-1)
    met = tl.load(table + num_ids + u, mask=there, other=0)
    emitted = tl.load(table + 2 * num_ids + u, mask=there, other=0)
    may_forbid = tl.load(table + 3 * num_ids + u, mask=there, other=0)
    for j in range(i):
        again = (tl.load(drafted + j) == token).to(tl.int32)
        met += again
        emitted += again
    place = logits + i.to(tl.int64) * vocab + token
    x = tl.load(place, mask=there, other=0.0) + tl.load(bias + u, mask=there, other=0.0)
    x = penalised(x, met, emitted, repetition, presence, frequency)
    x = tl.where((may_forbid > 0) & (i < early), float("-inf"), x)
    tl.store(place, x, mask=there)


def adjust_rows(
    logits: Tensor,
    options: RowOptions,
    position: Tensor,
    drafted: Tensor,
    first: int = 0,
    ids: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """`math.row_options.adjust_rows`; a new float32 tensor."""
    number, width = logits.shape
    marks = drafted if seen is None else seen.contiguous()
    adjusted = torch.empty(number, width, dtype=torch.float32, device=logits.device)
    adjust_rows_kernel[(number, triton.cdiv(width, ROWS_BLOCK))](
        logits, logits.stride(0), adjusted, options.counts, options.bias, options.bans,
        options.repetition, options.presence, options.frequency, options.min_new_tokens,
        position, drafted, drafted.stride(0), marks, position if ids is None else ids,
        width, options.counts.shape[1], number // len(position), first, marks.shape[-1],
        BRANCHED=seen is not None, REDUCED=ids is not None, SIZE=ROWS_BLOCK,
    )  # fmt: skip
    return adjusted


@triton.jit(do_not_specialize=("num_positions", "first", "num_marks"), do_not_specialize_on_alignment=COLUMNS)
def adjust_rows_kernel(
    logits, logits_stride,  # [R * n, width]
    adjusted,  # [R * n, width] float32, out
    counts,  # [R, V] int32
    bias,  # [R, V] float32
    bans,  # [R, V] uint8
    repetition, presence, frequency,  # [R] float64
    min_new_tokens, position,  # [R] int64
    drafted, drafted_stride,  # [R, ..] int64
    seen,  # [R * n, num_marks] bool, where BRANCHED: which of the drafted tokens a position has seen
    ids,  # [width] int64, where REDUCED
    width, vocab, num_positions, first, num_marks,
    BRANCHED: tl.constexpr, REDUCED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program a position and SIZE ids."""
    n = tl.program_id(0).to(tl.int64)
    row = n // num_positions
    at = tl.load(position + row)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = column < width
    x = tl.load(logits + n * logits_stride + column, mask=there, other=0.0).to(tl.float32)
    token = column.to(tl.int64)
    if REDUCED:
        token = tl.load(ids + column, mask=there, other=0)
    place = row * vocab + token
    count = tl.load(counts + place, mask=there, other=0)
    if BRANCHED:
        for j in range(num_marks):
            is_seen = tl.load(seen + n * num_marks + j).to(tl.int32)
            count += 2 * is_seen * (tl.load(drafted + row * drafted_stride + j) == token).to(tl.int32)
            at += is_seen
    else:
        i = n % num_positions + first
        for j in range(i):
            count += 2 * (tl.load(drafted + row * drafted_stride + j) == token).to(tl.int32)
        at += i
    x += tl.load(bias + place, mask=there, other=0.0)
    x = penalised(
        x, count, count >> 1, tl.load(repetition + row).to(tl.float32), tl.load(presence + row).to(tl.float32),
        tl.load(frequency + row).to(tl.float32),
    )  # fmt: skip
    bits = BANNED + tl.where(at == 0, BANNED_FIRST, 0) + tl.where(at < tl.load(min_new_tokens + row), BANNED_EARLY, 0)
    banned = tl.load(bans + place, mask=there, other=0).to(tl.int32) & bits
    tl.store(adjusted + n * width + column, tl.where(banned != 0, float("-inf"), x), mask=there)


@triton.jit
def penalised(x, met, emitted, repetition, presence, frequency):
    """Logits of ids met and emitted so often."""
    factor = tl.zeros_like(x) + repetition
    x = tl.where(met > 0, tl.where(x < 0, x * factor, tl.div_rn(x, factor)), x)
    return x - (tl.where(emitted > 0, presence, 0.0) + frequency * emitted.to(tl.float32))
