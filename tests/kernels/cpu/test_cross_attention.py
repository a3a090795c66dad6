"""Cross-attention on a CPU: the kernel against the reference, whatever rows, lengths and groups there are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from forerun import ops
from forerun.cache.base import CacheLayer
from forerun.config import Kernels
from forerun.kernels.cpu import cross_attention
from forerun.math import attention as reference
from forerun.math.attention import Form, Scale, plan_across
from support import rounding

CASES = {
    "a plain step": ((0,), (37,), (1,), 1),
    "a draft": ((1,), (64,), (5,), 1),
    "ragged rows and sources": ((2, 0, 1), (50, 3, 21), (1, 6, 9), 1),
    "several query heads a key head": ((0, 2), (30, 41), (2, 3), 3),
    "one key": ((0,), (1,), (2,), 1),
}
HEADS, SIZE, CAPACITY = 2, 16, 64


def layer() -> CacheLayer:
    generator = torch.Generator().manual_seed(1)
    return CacheLayer(*torch.randn(2, 3, CAPACITY, HEADS, SIZE, generator=generator))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", [Form.PAD, Form.SPLIT])
def test_attend_across_is_attend(case: str, form: Form) -> None:
    slots, lengths, counts, group = CASES[case]
    query = torch.randn(sum(counts), HEADS * group, SIZE, generator=torch.Generator().manual_seed(2))
    keys, values = layer().by_head
    plan, scale = plan_across(slots, lengths, counts, group, query.device, form), Scale(0.3, None, None)
    if form is Form.PAD and sorted(slots) != list(slots):
        plan = plan_across(slots, lengths, counts, group, query.device, Form.SPLIT)
    wanted = reference.attend(*(x.double() for x in (query, keys, values)), plan, scale)
    bound = rounding.of_attention(query, keys, values, scale.factor, max(lengths))
    assert cross_attention.why_not(query, keys, values, scale) is None
    for threads in (1, 2):
        found = cross_attention.attend_across(query, keys, values, plan, scale, threads)
        torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    found = ops.attend_across(query, keys, values, plan, scale, Kernels.ON)
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    shorter = plan_across(slots, tuple(max(1, n - 1) for n in lengths), counts, group, query.device, Form.SPLIT)
    if max(lengths) > 1:
        control = cross_attention.attend_across(query, keys, values, shorter, scale, 1)
        assert float((control - wanted).abs().max()) > bound, "a control: a key less is noticed"


def test_a_tokens_numbers_do_not_depend_on_its_neighbours() -> None:
    """To the bit, in drafts of up to four tokens and in any batch."""
    keys, values = layer().by_head
    query = torch.randn(7, HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    scale = Scale(0.25, None, None)
    together = cross_attention.attend_across(
        query, keys, values, plan_across((0, 1), (50, 33), (3, 4), 1, query.device), scale, 2
    )
    alone = cross_attention.attend_across(
        query[4:5], keys, values, plan_across((1,), (33,), (1,), 1, query.device), scale, 1
    )
    assert torch.equal(together[4:5], alone)


def test_what_does_not_fit_goes_to_the_reference() -> None:
    keys, values = layer().by_head
    query = torch.randn(2, HEADS, SIZE)
    plan = plan_across((0,), (20,), (2,), 1, query.device)
    for scale in (Scale(0.3, 5.0, None), Scale(0.3, None, torch.zeros(HEADS))):
        assert cross_attention.why_not(query, keys, values, scale)
        found = ops.attend_across(query, keys, values, plan, scale, Kernels.ON)
        torch.testing.assert_close(found, reference.attend(query, keys, values, plan, scale))
    assert cross_attention.why_not(query.double(), keys.double(), values.double(), Scale(0.3, None, None))
