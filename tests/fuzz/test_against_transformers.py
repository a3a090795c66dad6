"""Random calls, compared with `model.generate`: greedy text depends on no drafter, policy, rule, neighbour or kernel.

Every case is made of its seed alone, so a failure is repeated by its test's name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.math import verify as rules
from forerun.types import Rule
from fuzz.cases import case_of, check_against_transformers
from fuzz.misbehaving import WildDrafter

QUICK, ALL = 8, 320
pytestmark = pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning")  # some drafters and policies misbehave


@pytest.mark.quick(*map(str, range(QUICK)))
@pytest.mark.parametrize("seed", range(ALL))
def test_greedy_rows_are_transformers(seed: int) -> None:
    check_against_transformers(case_of(seed))


def _caught(seeds: range, **fixed: Any) -> bool:
    """Whether some case with these settings fails."""
    for seed in seeds:
        try:
            check_against_transformers(case_of(seed, **fixed))
        except AssertionError:
            return True
    return False


def test_control_a_rule_that_keeps_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafted token is kept, whatever the target says."""
    monkeypatch.setattr(rules, "count_accepted", lambda p, q, u, lengths: lengths)
    assert _caught(range(8), drafter="random", policy=2, rule="token", temperatures=(0.0, 0.9))


def test_control_a_law_below_zero_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the three guards against it, a drafter's law changes what a greedy row says beside a sampled one."""
    monkeypatch.setattr(rules, "claimed", lambda q: q.nan_to_num(0.0))
    monkeypatch.setattr("forerun.engine.draft_check._values", lambda probs, lengths: None)
    monkeypatch.setattr("forerun.engine.draft_check._denies", lambda law, tokens, lengths: False)
    monkeypatch.setattr(WildDrafter, "pick", lambda self, choices: "law: some negative")
    fixed: Any = {"drafter": "wild", "policy": 2, "rule": "token", "temperatures": (0.0, 0.9)}
    assert _caught(range(8), **fixed)
    monkeypatch.undo()
    assert not _caught(range(4), **fixed)


def test_control_numbers_that_follow_the_round_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule `coupled` with the numbers of other rules: then sampled text depends on the drafter."""
    right = rules.noise_of
    monkeypatch.setattr(rules, "noise_of", lambda keys, width, rule: right(keys, width, Rule.TOKEN))
    fixed: Any = {"drafter": "model", "policy": 3, "rule": "coupled", "dtype": torch.float64, "temperatures": (0.9,)}
    assert _caught(range(8), **fixed)
