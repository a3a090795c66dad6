"""Attention block by block against attention with every key, a mask and nothing left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.math import banded_attention
from forerun.math.attention import Scale
from forerun.math.banded_attention import attend_bands, bands
from forerun.math.ragged_attention import attend_ragged, reach_of
from forerun.types import RaggedRows

ROWS = RaggedRows((2, 0, 1), (5, 0, 30), (29, 33, 1))  # slots, past, counts: no multiples of a block
SCALES = {
    "plain": Scale(0.3),
    "capped": Scale(0.3, softcap=2.0),
    "sinks": Scale(0.3, sinks=torch.linspace(-1, 1, 4)),
}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("block", [1, 8, 192])
@pytest.mark.parametrize("window", [0, 1, 7, 33, 34, 100])
@pytest.mark.parametrize("kind", SCALES)
def test_blocks_see_what_rows_see(kind: str, window: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh rows and rows behind keys, heads that share keys; what nobody sees is NaN."""
    monkeypatch.setattr(banded_attention, "BLOCK", block)
    torch.manual_seed(0)
    query = torch.randn(sum(ROWS.counts), 4, 8, dtype=torch.float64)
    keys, values = (torch.randn(3, 40, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    for slot, past, count in zip(ROWS.slots, ROWS.past, ROWS.counts, strict=True):
        unseen = [slice(past + count, None)] + [slice(0, max(0, past + 1 - window))] * bool(window)
        for part in unseen:
            keys[slot, :, part] = values[slot, :, part] = torch.nan
    got = attend_bands(query, keys, values, bands(ROWS, window, query), SCALES[kind])
    clean = (each.nan_to_num(0.0) for each in (keys, values))
    want = attend_ragged(query, *clean, reach_of(ROWS, query.device, window), SCALES[kind])
    torch.testing.assert_close(got, want)


def test_a_block_reads_no_more_keys_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, run = [], banded_attention.softmax_product

    def counted(*call: Any, **named: Any) -> torch.Tensor:
        spans.append(call[1].shape[2])
        return run(*call, **named)

    monkeypatch.setattr(banded_attention, "BLOCK", 8)
    monkeypatch.setattr(banded_attention, "softmax_product", counted)
    rows, query, pool = RaggedRows((0,), (0,), (40,)), torch.randn(40, 2, 8), torch.randn(1, 2, 40, 8)
    attend_bands(query, pool, pool, bands(rows, 5, query), Scale(0.3))
    assert spans == [8, 12, 12, 12, 12]
    spans.clear()
    attend_bands(query, pool, pool, bands(rows, 40, query), Scale(0.3))
    assert spans == [40]  # a causal square, of which torch itself leaves out half
