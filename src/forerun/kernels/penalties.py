"""Bias and penalties in one launch, at every position of a row; the reference is `math.penalties`.

The reference gathers and scatters once for each kind of change. Here one program takes one position and a block of ids,
counts how often each was drafted before that position, and applies everything in the reference's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import working
from forerun.math.penalties import check_bias

BLOCK = 256  # ids a program


def why_not(logits: Tensor) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if logits.dtype == torch.float64 or not len(logits):
        return f"{len(logits)} rows of {logits.dtype}"
    return None


def adjust(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
    forbid: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> Tensor:
    """`math.penalties.adjust` for logits [n, V] of one row; a new float32 tensor."""
    check_bias(logits, params.logit_bias)
    adjusted = working(logits).contiguous().clone()
    positions, vocab = adjusted.shape
    drafted = list(drafted[: positions - 1])
    early = max(min_new_tokens - len(output), 0)
    before, emitted = Counter(prompt), Counter(output)
    touched = dict.fromkeys((*params.logit_bias, *before, *emitted, *drafted, *(forbid if early else ())))
    ids = [token for token in touched if 0 <= token < vocab]
    if not ids:
        return adjusted
    forbidden = set(forbid)
    table = torch.tensor(
        [
            ids,
            [before[token] + emitted[token] for token in ids],
            [emitted[token] for token in ids],
            [int(token in forbidden) for token in ids],
        ],
        dtype=torch.int32,
    ).to(logits.device)
    bias = torch.tensor([params.logit_bias.get(token, 0.0) for token in ids]).to(logits.device)
    along = torch.tensor(drafted or [-1], dtype=torch.int32).to(logits.device)
    adjust_kernel[(positions, triton.cdiv(len(ids), BLOCK))](
        adjusted, table, bias, along, len(ids), vocab, early,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, SIZE=BLOCK,
    )  # fmt: skip
    return adjusted


@triton.jit
def adjust_kernel(
    logits,  # [n, V] float32, changed in place
    table,  # [4, U] int32: id, times in prompt and output, times in the output, whether it may be forbidden
    bias,  # [U] float32
    drafted,  # [n - 1] int32
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
    factor = tl.zeros_like(x) + repetition
    x = tl.where(met > 0, tl.where(x < 0, x * factor, tl.div_rn(x, factor)), x)
    x -= tl.where(emitted > 0, presence, 0.0) + frequency * emitted.to(tl.float32)
    x = tl.where((may_forbid > 0) & (i < early), float("-inf"), x)
    tl.store(place, x, mask=there)
