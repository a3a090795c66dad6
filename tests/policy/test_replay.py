"""The self-tuning length on texts of a real model: several rows do not lose what one row gains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun.policy import Constant, CostModel
from forerun.policy.base import Policy
from forerun.policy.worth import Worth
from forerun.types import BatchView
from policy.replay import BUSY_XEON, NEOVERSE, NEW, XEON, Machine, Replay, plain_seconds, texts

MACHINES = {"neoverse": NEOVERSE, "xeon": XEON, "busy xeon": BUSY_XEON}
WARM_UP = 12  # tokens of one batch, which do not count
SEEDS = range(4)


class TokensAlike(CostModel):
    """Takes a token of any row for as good as one of the slowest."""

    def _worth(self, view: BatchView) -> Worth:
        return Worth()


def over_plain(make: Callable[[], Policy], machine: Machine, rows: int) -> dict[str, float]:
    """Time over that of plain decoding, by category; the policy goes on learning from one batch to the next."""
    said, spent, plain = texts(), dict[str, float](), dict[str, float]()
    categories = list(dict.fromkeys(text.category for text in said))
    assert len(categories) == 5
    for seed in SEEDS:
        policy, replay = make(), Replay(machine, seed)
        replay.generate(policy, said[:rows], WARM_UP)
        for category in categories[:: 1 if seed % 2 else -1]:
            own = [text for text in said if text.category == category]
            for first in range(0, len(own), rows):
                batch = own[first : first + rows]
                spent[category] = spent.get(category, 0.0) + replay.generate(policy, batch)
                plain[category] = plain.get(category, 0.0) + plain_seconds(machine, batch)
    return {category: seconds / plain[category] for category, seconds in spent.items()}


def mean(ratios: dict[str, float]) -> float:
    return sum(ratios.values()) / len(ratios)


@pytest.mark.quick("4-neoverse", "8-xeon")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [4, 8])
def test_several_rows_lose_no_hundredth_to_plain_decoding(rows: int, name: str) -> None:
    ratios = over_plain(CostModel, MACHINES[name], rows)
    assert mean(ratios) <= 1.01
    assert max(ratios.values()) <= 1.02
    assert mean(over_plain(lambda: Constant(2), MACHINES[name], rows)) > 1.05, "the bound would notice a bad policy"


@pytest.mark.quick("neoverse")
@pytest.mark.parametrize("name", MACHINES)
def test_one_row_keeps_its_gain(name: str) -> None:
    assert mean(over_plain(CostModel, MACHINES[name], 1)) <= 0.80


def test_a_row_that_runs_ahead_of_the_others_is_not_counted_as_a_gain() -> None:
    """Four rows: each position costs more than the part of a round that a row saves by ending earlier."""
    assert mean(over_plain(TokensAlike, NEOVERSE, 4)) > 1.01
    assert NEOVERSE.scoring(5) - NEOVERSE.scoring(4) > NEOVERSE.scoring(4) - NEOVERSE.scoring(3)


def test_what_is_replayed_is_what_was_said() -> None:
    for text in texts():
        assert len(text.copies) == len(text.drawn) == NEW
        assert all(found.kept <= min(found.length, NEW - place) for place, found in enumerate(text.copies))
        assert sum(text.drawn) > 0
