"""What a round is judged by: the target's law along every draft, and what counts its random numbers.

All of it is sent while the pass that it judges may still run, so nothing here waits for the device, unless a caller's
own processor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.engine.branching import adjusted_along
from forerun.engine.row import Row
from forerun.math.laws import LogitLaw
from forerun.math.transfer import int64, to_device
from forerun.types import Draft, Keys, LawParams


def law_of(
    batch: list[Row],
    blocks: list[list[int]],
    logits: Tensor,
    params: LawParams,
    trees: list[list[int]] | None,
) -> LogitLaw:
    """The target's law at every scored position, each row with its own penalties along its draft."""
    device, lengths = logits.device, [len(block) for block in blocks]
    counts = to_device(int64(lengths), device)
    starts = counts.cumsum(0) - counts
    index = starts[:, None] + torch.arange(max(lengths), device=device)
    # Listed here: on a CPU repeat_interleave calls for all threads, however few the rows, and waits for them.
    owner = to_device(int64([row for row, length in enumerate(lengths) for _ in range(length)]), device)
    if any(row.adjuster for row in batch):
        parts = logits.split(lengths)
        known = [None] * len(batch) if trees is None else trees
        rows = zip(batch, blocks, parts, known, strict=True)
        logits = torch.cat([_adjusted(row, block[1:], part, parents) for row, block, part, parents in rows])
    return LogitLaw(logits, index, params, owner)


def _adjusted(row: Row, drafted: list[int], logits: Tensor, parents: list[int] | None) -> Tensor:
    if row.adjuster is None:
        return logits
    if parents is None:
        return row.adjuster(logits, drafted, 0)
    return adjusted_along(logits, drafted, parents, row.adjuster)


def params_of(batch: Sequence[Row], device: torch.device) -> LawParams:
    """Each row's sampling parameters, on their way to a device that may be busy with a pass."""
    params = LawParams.stack([row.request.params for row in batch])
    return replace(
        params,
        temperature=to_device(params.temperature, device),
        top_k=to_device(params.top_k, device),
        top_p=to_device(params.top_p, device),
        min_p=to_device(params.min_p, device),
    )


def keys_of(batch: list[Row], device: torch.device) -> Keys:
    columns = [
        [row.request.seed for row in batch],
        [row.request.request_id for row in batch],
        [row.round for row in batch],
        [len(row.output) for row in batch],
    ]
    seed, request_id, round_, position = to_device(torch.tensor(columns, dtype=torch.int64), device)
    return Keys(seed, request_id, round_, position)


def tokens_of(draft: Draft) -> list[list[int]]:
    """Each row's drafted tokens."""
    lengths = draft.lengths.tolist()
    return [row[:length] for row, length in zip(draft.tokens.tolist(), lengths, strict=True)]
