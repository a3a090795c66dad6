"""`kernels.advance` and `kernels.random` against `math.advance` and `math.random`: the same numbers, bit for bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun.kernels import advance as kernel
from forerun.kernels import random as random_kernel
from forerun.math import advance as reference
from forerun.math import random as random_reference
from forerun.math.advance import HEAD, DeviceRowState
from forerun.types import Keys, Rule, Verdict
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

WIDTH = 9


def numbers(rows: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def state(rows: int) -> DeviceRowState:
    active = torch.ones(rows, dtype=torch.int64, device=DEVICE)
    active[rows - 1 :] = rows == 1  # the last place has no row, unless it is the only one
    block = torch.randint(0, 90, (rows, 1 + WIDTH), generator=torch.Generator().manual_seed(9)).to(DEVICE)
    result = torch.full((rows, HEAD + WIDTH - 1), -7, device=DEVICE)
    return DeviceRowState(numbers(rows, 50, 1), numbers(rows, 9, 2), numbers(rows, 40, 3), active, block, result)


def verdict(rows: int) -> Verdict:
    """Views of one packed tensor, as verification gives them; one next token is no token."""
    packed = torch.stack([numbers(rows, WIDTH, 4), numbers(rows, 90, 5), numbers(rows, 2, 6), numbers(rows, 9, 7)], 1)
    packed[0, 1] = 2**31 - 1
    return Verdict(packed[:, 0], packed[:, 1], packed.view(torch.bool)[:, 2 * 8])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_advance(rows: int) -> None:
    ours, theirs, drafted = state(rows), state(rows), numbers(rows, WIDTH, 8)
    kernel.advance(ours, drafted, verdict(rows), 90)
    reference.advance(theirs, drafted, verdict(rows), 90)
    for field in fields(DeviceRowState):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
    assert ours.block[0, 1] == 89, "a next token that is none must be one that can be looked up"
    assert rows == 1 or ours.past[-1] == state(rows).past[-1], "a place without a row stays where it is"


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_emitted_is_counted(rows: int) -> None:
    """The whole draft of one row is kept, as wide as the block."""
    ours, theirs, drafted, found = state(rows), state(rows), numbers(rows, WIDTH, 8), verdict(rows)
    found.num_accepted[0] = WIDTH - 1
    counts = torch.randint(0, 5, (rows, 90), dtype=torch.int32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got, want = counts.clone(), counts.clone()
    kernel.advance(ours, drafted, found, 90, got)
    reference.advance(theirs, drafted, found, 90, want)
    assert torch.equal(got, want) and torch.equal(ours.position, theirs.position)
    gained = theirs.position - state(rows).position
    assert torch.equal((want - counts).sum(1), 2 * gained) and gained[0] == WIDTH


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_draft_lengths(rows: int) -> None:
    given = numbers(rows, 9, 1), numbers(rows, 12, 2), numbers(rows, 14, 3)
    want = reference.draft_lengths(*given, 5)
    assert torch.equal(kernel.draft_lengths(*given, 5), want)
    assert want.min() >= 0 and want.max() <= 5


@pytest.mark.parametrize(("rows", "count", "number"), [(1, 1, 1), (3, 2, 1), (8, 1, 4), (3, 9, 2)])
def test_lay_out(rows: int, count: int, number: int) -> None:
    past = numbers(rows, 60, 2) - 1
    past[0] = -1  # a row of one token, whose draft begins with two
    given = numbers(rows, 20, 1), past, count, number, 64, 50
    ours, theirs = kernel.lay_out(*given), reference.lay_out(*given)
    for field in fields(reference.PassLayout):
        got, want = getattr(ours, field.name), getattr(theirs, field.name)
        assert torch.equal(got, want) and got.dtype is want.dtype, field.name
    assert theirs.positions.min() == 0 and theirs.addresses[0, 0] == (given[0][0] + 1) * 64 - 1, "its own last place"


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("before", [-1, -16, -39])  # a short row whose long draft reads blocks' worth of places back
@pytest.mark.parametrize(("rows", "count", "number"), [(1, 1, 1), (3, 2, 1), (8, 1, 4), (3, 9, 2)])
def test_lay_out_in_blocks(rows: int, count: int, number: int, before: int) -> None:
    """What lies before a row, past its blocks or past the table goes to block 0."""
    past, size, width = numbers(rows, 60, 2) - 1, 16, 4
    past[0], past[-1] = (before, 62) if rows > 1 else (before, before)
    table = torch.randint(1, 99, (20, width), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    table[:, -1] = 0
    slots, table = numbers(rows, 20, 1), table.to(DEVICE)
    given = slots, past, count, number, size, 50, table
    ours, theirs = kernel.lay_out(*given), reference.lay_out(*given)
    for field in fields(reference.PassLayout):
        got, want = getattr(ours, field.name), getattr(theirs, field.name)
        assert torch.equal(got, want) and got.dtype is want.dtype, field.name
    places = past[:, None] + torch.arange(count, device=DEVICE)
    for row, slot in enumerate(slots.tolist()):
        for i, place in enumerate(places[row].tolist()):
            block = int(table[slot, place // size]) if 0 <= place < width * size else 0
            assert theirs.addresses[0, row * count + i] == block * size + place % size


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7)])
def test_draft_uniforms(rule: Rule, rows: int, width: int) -> None:
    seeds = torch.tensor([2**62 + 5, -3, 7])[:rows].to(DEVICE)
    keys = Keys(seeds, numbers(rows, 2**31, 1), numbers(rows, 999, 2), numbers(rows, 999, 3))
    got = random_kernel.draft_uniforms(keys, width, rule)
    assert torch.equal(got, random_reference.draft_uniforms(keys, width, rule))
    later = Keys(keys.seed, keys.request_id, keys.round + 1, keys.position + 1)
    assert not torch.equal(random_kernel.draft_uniforms(later, width, rule), got), "another round, other numbers"
