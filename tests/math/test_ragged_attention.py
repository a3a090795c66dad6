"""`attend_prompts`, torch's own attention row by row, against `attend_ragged`."""

from __future__ import annotations

import pytest
import torch

from forerun.math import ragged_attention
from forerun.math.attention import Scale
from forerun.math.prompt_attention import joined
from forerun.math.ragged_attention import attend_prompts, attend_ragged, keys_of, reach_of, why_not_prompts
from forerun.types import RaggedRows
from support.interpreter import on_gpu_alone

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


def test_float64_is_not_rounded() -> None:
    """By torch's own attention, which has float64 throughout; in float32 they are 1e-7 apart."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(*shape, dtype=torch.float64) for shape in ((21, 4, 8), *((3, 2, 16, 8),) * 2))

    def apart(dtype: torch.dtype) -> float:
        parts = (query.to(dtype), keys.to(dtype), values.to(dtype))
        got = attend_ragged(*parts, reach_of(ROWS, query.device), Scale(0.3))
        return float((got - attend_prompts(query, keys, values, ROWS, None, Scale(0.3))).abs().max())

    assert apart(torch.float64) < 1e-14
    assert apart(torch.float32) > 1e-8


def test_blocks_that_follow_one_another_are_not_copied() -> None:
    torch.manual_seed(0)
    query, pool = torch.randn(6, 2, 8), torch.randn(7, 4, 2, 8).transpose(1, 2)  # blocks of four keys
    table = torch.tensor([[3, 4, 5], [1, 6, 2]], dtype=torch.int32)
    for slot, first in ((0, 3), (0, None), (1, None)):
        rows = RaggedRows((slot,), (5,), (6,), (first,))
        assert (keys_of(pool, rows, 0, table).data_ptr() == pool[3].data_ptr()) is (first is not None)
        want = attend_ragged(query, pool, pool, reach_of(rows, query.device, table=table), Scale(0.3))
        torch.testing.assert_close(attend_prompts(query, pool, pool, rows, table, Scale(0.3)), want)


def test_attention_in_two_parts_is_attention() -> None:
    """Shares are taken in float32: those of bfloat16 would be off by as much as the result is rounded."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    seen = torch.ones(6, 11, dtype=torch.bool).tril(5)
    scores = (query @ keys.mT).masked_fill(~seen, -torch.inf)
    parts = [
        part
        for own, their in ((scores[..., :5], values[:, :, :5]), (scores[..., 5:], values[:, :, 5:]))
        for part in (own.softmax(-1) @ their, own.logsumexp(-1, keepdim=True))
    ]
    want = scores.softmax(-1) @ values
    torch.testing.assert_close(joined(*parts), want)
    rounded = joined(parts[0].bfloat16(), parts[1], parts[2].bfloat16(), parts[3])
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), want, atol=2e-2, rtol=2**-8)


@pytest.mark.gpu
@on_gpu_alone
@pytest.mark.parametrize("past", [0, 300])
@pytest.mark.parametrize(
    ("dtype", "heads", "size", "apart"),
    [(torch.bfloat16, (8, 2), 128, 2e-2), (torch.float16, (4, 1), 96, 4e-3), (torch.float32, (4, 4), 64, 1e-4)],
    ids=str,
)
def test_prompts_on_a_gpu(dtype: torch.dtype, heads: tuple[int, int], size: int, apart: float, past: int) -> None:
    """torch has another kernel for each type there, and each has its own idea of a mask that is no square."""
    torch.manual_seed(0)
    query = torch.randn(500, heads[0], size, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, 1, heads[1], past + 500, size, device="cuda", dtype=dtype)
    rows, scale = RaggedRows((0,), (past,), (500,)), Scale(size**-0.5)
    got = attend_prompts(query, keys, values, rows, None, scale)
    want = attend_ragged(query.float(), keys.float(), values.float(), reach_of(rows, query.device), scale)
    torch.testing.assert_close(got.float(), want, atol=apart, rtol=apart)


def test_what_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fewer" in str(why_not_prompts(ROWS, 0, Scale(1.0)))
    monkeypatch.setattr(ragged_attention, "PROMPT", 9)
    assert why_not_prompts(ROWS, 0, Scale(1.0)) is None
    assert why_not_prompts(ROWS, 14, Scale(1.0)) is None, "a window that holds all keys"
    assert "window" in str(why_not_prompts(ROWS, 13, Scale(1.0)))
    assert "capped" in str(why_not_prompts(ROWS, 0, Scale(1.0, softcap=5.0)))
