"""What rows ask of their logits, written for the device: penalties, biases, bans, a minimum length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from forerun.engine.bans import Bans
from forerun.engine.row import Row
from forerun.math.row_options import NEVER, NOT_EARLY, NOT_FIRST, RowOptions
from forerun.math.transfer import float64, int64

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
    met, biases, bans = Entries(), Entries(), Entries()
    for place, row in enumerate(rows):
        start, params = place * vocab_size, row.request.params
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            met.add(start, row.prompt_ids, 1)
            met.add(start, int64(row.output), 2)
        if params.logit_bias:
            biases.add(start, int64(params.logit_bias), float64(params.logit_bias.values()))
        if banned := {token: bits for token, bits in _banned(row).items() if 0 <= token < vocab_size}:
            bans.add(start, int64(banned), int64(banned.values()))
    if met.ids:
        options.counts.view(-1).index_add_(0, *met.columns(send, torch.int32))
    for table, entries in ((options.bias, biases), (options.bans, bans)):
        if entries.ids:
            table.view(-1).index_copy_(0, *entries.columns(send, table.dtype))


def _banned(row: Row) -> dict[int, int]:
    """Ids a row must not emit somewhere, and the bits that say where."""
    request, bans = row.request, row.bans or Bans()
    early: Iterable[int] = request.stop_ids if len(row.output) < request.min_new_tokens else ()
    bits: dict[int, int] = {}
    for ids, bit in ((bans.never, NEVER), (bans.not_first, NOT_FIRST), (early, NOT_EARLY)):
        for token in ids:
            bits[token] = bits.get(token, 0) | bit
    return bits


class Entries:
    """Of a table [R, V]: written whenever a row comes or goes, and prompts are long, so never one by one."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, start: int, ids: Tensor, values: Tensor | int) -> None:
        """Behind the first `start` entries; one value may do for all ids."""
        self.ids.append(ids + start)
        self._values.append(values if isinstance(values, Tensor) else torch.full_like(ids, values))

    def columns(self, send: Send, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return send(torch.cat(self.ids)), send(torch.cat([values.to(dtype) for values in self._values]))
