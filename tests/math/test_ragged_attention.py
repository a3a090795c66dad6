"""`attend_prompts`, torch's own attention row by row, against `attend_ragged`."""

from __future__ import annotations

import pytest
import torch

from forerun.math import ragged_attention
from forerun.math.attention import Scale
from forerun.math.ragged_attention import attend_prompts, attend_ragged, reach_of, why_not_prompts
from forerun.types import RaggedRows

ROWS = RaggedRows((2, 0), (5, 0), (9, 12))  # slots, past, counts


@pytest.mark.parametrize("paged", [False, True])
def test_prompts(paged: bool) -> None:
    """A prompt behind a past and a fresh one, heads that share keys, rows in one piece and in blocks."""
    torch.manual_seed(0)
    query = torch.randn(21, 4, 8)
    keys, values = torch.randn(3, 2, 16, 8), torch.randn(3, 2, 16, 8)
    table = None
    if paged:  # each row's sixteen places as four blocks, in any order
        order = torch.randperm(12)
        table = order.argsort().view(3, 4).int()
        keys, values = (t.view(3, 2, 4, 4, 8).transpose(1, 2).flatten(0, 1)[order] for t in (keys, values))
    scale = Scale(0.3)
    got = attend_prompts(query, keys, values, ROWS, table, scale)
    want = attend_ragged(query, keys, values, reach_of(ROWS, query.device, table=table), scale)
    torch.testing.assert_close(got, want)


def test_what_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fewer" in str(why_not_prompts(ROWS, 0, Scale(1.0)))
    monkeypatch.setattr(ragged_attention, "PROMPT", 9)
    assert why_not_prompts(ROWS, 0, Scale(1.0)) is None
    assert why_not_prompts(ROWS, 14, Scale(1.0)) is None, "a window that holds all keys"
    assert "window" in str(why_not_prompts(ROWS, 13, Scale(1.0)))
    assert "capped" in str(why_not_prompts(ROWS, 0, Scale(1.0, softcap=5.0)))
