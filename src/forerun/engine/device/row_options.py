"""What rows ask of their logits, written for the device: penalties, biases, bans, a minimum length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from forerun.engine.bans import Bans
from forerun.engine.row import Row
from forerun.math.row_options import NEVER, NOT_EARLY, NOT_FIRST, RowOptions

Send = Callable[[Tensor], Tensor]  # a tensor of the host -> the same on the device


def why_not(row: Row) -> str | None:
    """What a row asks of its logits that only the host can do; None where the device can do all of it."""
    if row.bans is None:
        return "processors that are called in Python"
    if len(row.output) < row.bans.since:
        return "a token that a processor prescribes"
    return None


def wants_options(row: Row) -> bool:
    """Whether a row changes its logits at all."""
    return row.adjuster is not None and (row.request.params.has_penalties or bool(_banned(row)))


def make_options(size: int, vocab_size: int, device: torch.device, **columns: Tensor) -> RowOptions:
    """For `size` rows, of which none has met anything yet; `columns` are the tensors [R] of a row table."""
    return RowOptions(
        counts=torch.zeros(size, vocab_size, dtype=torch.int32, device=device),
        bias=torch.zeros(size, vocab_size, device=device),
        bans=torch.zeros(size, vocab_size, dtype=torch.uint8, device=device),
        **columns,
    )


def write_options(options: RowOptions, rows: Sequence[Row], send: Send) -> None:
    """Everything of `rows` that a row table has no column for. Entries of other rows are neutral."""
    options.clear()
    vocab_size = options.counts.shape[1]
    met: list[tuple[int, int]] = []
    biases: list[tuple[int, float]] = []
    bans: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        start, params = place * vocab_size, row.request.params
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            met += [(start + token, 1) for token in set(row.request.prompt)]
            met += [(start + token, 2) for token in row.output]
        biases += [(start + token, bias) for token, bias in params.logit_bias.items()]
        bans += [(start + token, bits) for token, bits in _banned(row).items() if 0 <= token < vocab_size]
    if met:
        places, times = _columns(met, send, torch.int32)
        options.counts.view(-1).index_add_(0, places, times)
    for table, entries in ((options.bias, biases), (options.bans, bans)):
        if entries:
            places, values = _columns(entries, send, table.dtype)
            table.view(-1).index_copy_(0, places, values)


def _banned(row: Row) -> dict[int, int]:
    """Ids a row must not emit somewhere, and the bits that say where."""
    request, bans = row.request, row.bans or Bans()
    early: Iterable[int] = request.stop_ids if len(row.output) < request.min_new_tokens else ()
    bits: dict[int, int] = {}
    for ids, bit in ((bans.never, NEVER), (bans.not_first, NOT_FIRST), (early, NOT_EARLY)):
        for token in ids:
            bits[token] = bits.get(token, 0) | bit
    return bits


def _columns(entries: Sequence[tuple[int, float]], send: Send, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    places, values = zip(*entries, strict=True)
    return send(torch.tensor(places)), send(torch.tensor(values, dtype=dtype))
