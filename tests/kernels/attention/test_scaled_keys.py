"""Keys and values that are rounded: written and read by kernels as `math.scaled` rounds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun.cache.paged import PagedCache
from forerun.kernels.attention import attend, cache_write
from forerun.kernels.attention.shape import TUNING
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math import cache_write as write_reference
from forerun.math import ragged_attention as reference
from forerun.math.attention import Form
from forerun.math.scaled import FP8, INT8, Scheme, rounded_rows
from forerun.types import RaggedRows
from kernels.attention.cases import ROWS, Case, make_case, random_tree
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

SCHEMES = [pytest.param(INT8, id="int8"), pytest.param(FP8, id="fp8")]
SMALL = replace(TUNING, block_bytes=0, resident=1000)


def rounded(by_head: Tensor, scheme: Scheme) -> ScaledKeys:
    """[R, Hk, C, D] as a cache holds it; what is no number stays none."""
    base = by_head.transpose(1, 2).contiguous()
    values, scales = rounded_rows(base, scheme)
    return ScaledKeys(values, scales.transpose(1, 2).contiguous(), scheme, by_head.dtype).by_head()


def wide(keys: ScaledKeys) -> Tensor:
    return keys.raw.float() * keys.scales.unsqueeze(-1)


def check(case: Case, scheme: Scheme, form: Form, tuning: Any = SMALL) -> None:
    keys, values = rounded(case.keys, scheme), rounded(case.values, scheme)
    want = reference.attend_ragged(case.query, wide(keys), wide(values), case.reach, case.scale)
    assert want.isfinite().all()
    got = attend.attend_ragged(case.query, keys, values, case.reach, case.scale, form, tuning)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", [Form.PAD, Form.SPLIT, Form.KEYS])
@pytest.mark.parametrize("how", [{}, {"window": 12, "softcap": 2.0, "sinks": True}], ids=["plain", "all"])
@pytest.mark.quick("plain-pad-int8")
def test_attention_reads_what_is_stored(scheme: Scheme, form: Form, how: dict[str, Any]) -> None:
    """Rows in one piece and in blocks; past a row's keys numbers and scales are NaN."""
    case = make_case(**how)
    check(case, scheme, form)
    check(case.in_blocks(32), scheme, form)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick("int8")
def test_trees(scheme: Scheme) -> None:
    check(make_case().with_tree(random_tree(ROWS, 6)), scheme, Form.SPLIT)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", [Form.SPLIT, Form.KEYS])
@pytest.mark.quick("split-int8")
def test_another_text_is_read_as_it_is_stored(scheme: Scheme, form: Form) -> None:
    """Cross-attention: no order among keys, of which there may be fewer than queries."""
    case = make_case(RaggedRows(slots=(3, 0, 2), past=(70, -2, 17), counts=(3, 5, 1)))
    whole = replace(case, reach=replace(case.reach, across=True))
    check(whole, scheme, form)
    check(whole.in_blocks(32), scheme, form)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick("int8")
def test_a_bias_by_distance(scheme: Scheme) -> None:
    """T5's, along chains and trees."""
    case = make_case(heads=(2, 2), distances=6)
    check(case, scheme, Form.SPLIT)
    check(case.with_tree(random_tree(ROWS, 6)).in_blocks(32), scheme, Form.SPLIT)


def test_control_scales_of_other_keys_are_noticed() -> None:
    case = make_case()
    keys, values = rounded(case.keys, INT8), rounded(case.values, INT8)
    want = reference.attend_ragged(case.query, wide(keys), wide(values), case.reach, case.scale)
    wrong = ScaledKeys(keys.raw, keys.scales.roll(1, 2), INT8, keys.dtype, True)
    got = attend.attend_ragged(case.query, wrong, values, case.reach, case.scale, Form.SPLIT, SMALL)
    assert not torch.allclose(got, want, rtol=1e-3, atol=1e-3)


def test_odd_heads_are_left_to_the_reference() -> None:
    """Bytes are read in pairs."""
    keys = rounded(torch.randn(2, 3, 8, 9, device=DEVICE), INT8)
    reason = attend.why_not(torch.randn(2, 3, 9, device=DEVICE), keys, keys)
    assert reason is not None and "odd heads" in reason


def pools(scheme: Scheme) -> tuple[ScaledKeys, ScaledKeys]:
    key, value = (ScaledKeys.zeros((3, 8, 5, size), scheme, torch.float32, DEVICE) for size in (12, 10))
    return key.flat(), value.flat()


def same(got: ScaledKeys, want: ScaledKeys) -> None:
    assert torch.equal(got.raw.view(torch.uint8), want.raw.view(torch.uint8))
    torch.testing.assert_close(got.scales, want.scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_are_written_as_the_reference_writes_them(scheme: Scheme) -> None:
    """Bit for bit, scales included; a head of zeros."""
    torch.manual_seed(0)
    keys, values, query = (torch.randn(4, heads, size).to(DEVICE) for heads, size in ((5, 12), (5, 10), (10, 12)))
    keys[1, 2] = 0
    addresses = torch.tensor([3, 17, 9, 23], device=DEVICE)
    made, want = pools(scheme), pools(scheme)
    cache_write.write(keys, values, addresses, *made)
    write_reference.write(keys, values, addresses, *want)
    for got, right in zip(made, want, strict=True):
        same(got, right)
    angles = torch.randn(4, 4, device=DEVICE).repeat(1, 2)
    made, want = pools(scheme), pools(scheme)
    turned = cache_write.rotate_and_write(query, keys, values, angles.cos(), angles.sin(), addresses, *made)
    right_turned = write_reference.rotate_and_write(query, keys, values, angles.cos(), angles.sin(), addresses, *want)
    assert torch.equal(turned, right_turned)
    for got, right in zip(made, want, strict=True):
        same(got, right)


def test_rows_are_copied_shared_and_cut_as_they_are_stored() -> None:
    """What is moved is not rounded again: the same bytes, the same scales."""
    cache = PagedCache(64, DEVICE, block_size=8, scheme=INT8)
    for row in (0, 1, 2):
        cache.admit(row)
    new = torch.randn(11, 5, 12, device=DEVICE)
    places = cache.extend([0], [11])
    layer = cache.write(0, cache.addresses(places).to(DEVICE), new, new[..., :10])
    assert cache.num_bytes() == sum(t.nbytes for t in layer.stored)

    def numbers(row: int, count: int) -> Tensor:
        rows = cache.extend([row], [0])
        blocks, within = cache.locate(rows, torch.arange(count)[None].to(DEVICE))
        return layer.by_head[0][blocks[:, None], torch.arange(5, device=DEVICE)[:, None], within[:, None]][0]

    values, scales = rounded_rows(new, INT8)
    first = numbers(0, 11)
    torch.testing.assert_close(first, (values * scales.unsqueeze(-1)).transpose(0, 1))
    cache.copy(0, 1, 11)
    assert torch.equal(numbers(1, 11), first)
    cache.keep(1, 8, [1, 2])
    assert torch.equal(numbers(1, 10)[:, 8:], first[:, [9, 10]])
    assert torch.equal(numbers(0, 11), first), "what others read stays as it is"
    cache.move(torch.tensor([cache._address(0, 2)], device=DEVICE), torch.tensor([cache._address(0, 3)], device=DEVICE))
    assert torch.equal(numbers(0, 11)[:, 3], first[:, 2])
    assert not isinstance(cache.beside(DEVICE).layer(0, new, new).keys, ScaledKeys), "drafters round nothing"


def test_anything_else_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="rounded keys"):
        pools(INT8)[0].mul_(2)
