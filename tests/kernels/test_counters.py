"""Counters are at 0 for whoever takes them, and nothing that may run at the same time shares any."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels import counters
from forerun.kernels.counters import ALIGNED, Counters
from forerun.math.sigmoid import Sigmoid
from forerun.types import Rule
from kernels.verify.cases import make
from support.triton_cpu import INTERPRETED  # before any kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu]

CPU = torch.device("cpu")


def addresses(tensor: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() + 4 * i for i in range(len(tensor))}


def test_every_stream_and_every_captured_call_has_its_own() -> None:
    own = Counters(CPU, room=8 * ALIGNED)
    taken = [own.of_stream(1, 3), own.of_stream(2, 3), own.take(5), own.take(5)]
    assert len(set().union(*(addresses(each) for each in taken))) == 3 + 3 + 5 + 5
    assert own.of_stream(1, 2).data_ptr() == taken[0].data_ptr()  # launches of one stream follow each other
    assert {(each.data_ptr() - taken[0].data_ptr()) % (4 * ALIGNED) for each in taken} == {0}


def test_where_no_room_is_left_there_is_memory_of_its_own() -> None:
    own = Counters(CPU, room=ALIGNED)
    own.take(ALIGNED)[:] = 7
    other = own.take(4)
    assert other.tolist() == [0] * 4 and not addresses(other) & addresses(own.zeros)


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Sigmoid(-10.0, 10.0)])
def test_kernels_leave_them_at_zero(rule: object) -> None:
    round_ = make(1500, rows=2, width=2)
    first = round_.judged(rule)
    assert counters.counters(2, first.next_token.device).tolist() == [0, 0]
    assert torch.equal(round_.judged(rule).next_token, first.next_token)
