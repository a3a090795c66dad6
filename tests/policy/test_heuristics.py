"""The published length rules, against traces worked out by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from forerun.errors import InvalidArgument
from forerun.policy import BassHeuristic, Constant, CostModel, HfHeuristic, OwnAcceptance, as_policy
from forerun.policy.base import Policy
from policy.rounds import as_draft, outcome, view


def step(policy: Policy, accepted: int | None, ended: bool = False, request: int = 0) -> int:
    """One round of one row; None keeps the whole draft. Returns the length drafted."""
    (drafted,) = policy.lengths(view(request))
    kept = drafted if accepted is None else accepted
    policy.observe(outcome((request,), (drafted,), (kept,), ended=(ended,)))
    return drafted


def test_hf_goes_up_by_two_down_by_one_and_never_below_one() -> None:
    policy = HfHeuristic()
    seen = [step(policy, kept) for kept in (None, None, 3, 0, 0, 0, 0, 0, 0, 0, 0, None, 0)]
    assert seen == [5, 7, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 3]


def test_hf_rows_go_their_own_ways() -> None:
    policy = HfHeuristic()
    assert policy.lengths(view(7, 8)) == (5, 5)
    policy.observe(outcome((7, 8), (5, 5), (5, 2)))
    assert policy.lengths(view(8, 7)) == (4, 7)


@pytest.mark.parametrize(("persistent", "opening"), [(True, 8), (False, 5)])
def test_hf_persistence(persistent: bool, opening: int) -> None:
    policy = HfHeuristic(persistent=persistent)
    for kept in (None, None):
        step(policy, kept)
    step(policy, 2, ended=True)  # 9 -> 8
    assert step(policy, None, request=1) == opening


def test_hf_round_that_ends_on_a_kept_stop_token_is_no_success() -> None:
    policy = HfHeuristic()
    step(policy, None, ended=True)
    assert step(policy, 0, request=1) == 4


def test_hf_forgets_finished_requests_and_ignores_empty_drafts() -> None:
    policy = HfHeuristic()
    for request in range(50):
        policy.lengths(view(request))
        policy.observe(outcome((request,), (0,), (0,), ended=(True,)))
    assert not policy._length
    assert step(policy, 0, request=99) == 5


def bass(policy: BassHeuristic, *accepted: int) -> int:
    ids = tuple(range(len(accepted)))
    drafted = policy.lengths(view(*ids))
    assert len(set(drafted)) == 1, "one length for the whole batch"
    policy.observe(outcome(ids, drafted, accepted))
    return policy.length


def test_bass_trace() -> None:
    policy = BassHeuristic()
    trace = [bass(policy, 7), bass(policy, 9), bass(policy, 3), bass(policy, 3), bass(policy, 6), bass(policy, 6)]
    assert trace == [9, 11, 9, 7, 6, 8]
    assert bass(policy, 0) == 7  # the hit has cleared the memory of misses: 8 - 1 - 0


def test_bass_first_miss_shortens_the_default() -> None:
    assert bass(BassHeuristic(), 0) == 6  # a floor instead of the ceiling would stay at 7


def test_bass_is_led_by_its_best_row_and_capped() -> None:
    policy = BassHeuristic(l0=31)
    assert bass(policy, 0, 31, 4) == 32
    assert bass(policy, 32, 0, 0) == 32


def test_bass_bounds() -> None:
    rng = random.Random(3)
    policy = BassHeuristic()
    for _ in range(3000):
        length = policy.length
        accepted = [rng.randint(0, length) if rng.random() < 0.5 else min(rng.randint(0, 3), length) for _ in range(3)]
        after = bass(policy, *accepted)
        assert 1 <= after <= 32
        assert after >= max(accepted)


def test_own_acceptance_goes_up_and_down_by_one_within_its_limit() -> None:
    policy = OwnAcceptance(limit=5)
    assert [step(policy, kept) for kept in (None, None, None, 0, 3, None)] == [3, 4, 5, 5, 4, 3]
    policy.observe(outcome((7, 8), (3, 3), (3, 2)))
    assert policy.lengths(view(8, 7)) == (2, 4)


def test_own_acceptance_pauses_longer_each_time_and_begins_anew_after_a_kept_draft() -> None:
    policy = OwnAcceptance(start=1, patience=8)
    drafted = [step(policy, 0) for _ in range(60)]
    tries = [place for place, length in enumerate(drafted) if length]
    assert [b - a for a, b in itertools.pairwise(tries)] == [2, 3, 5, 9, 9, 9, 9, 9]
    while not policy.lengths(view(0))[0]:
        step(policy, 0)
    assert step(policy, None) == 1
    assert [step(policy, 0) for _ in range(4)] == [2, 1, 0, 1]  # a pause of one round again


def test_own_acceptance_leaves_dear_drafts_out_and_follows_copies() -> None:
    policy, dear = OwnAcceptance(), replace(view(7), is_mixed=True, needs_clock=True)
    assert policy.lengths(dear) == (0,) and policy.copy_lengths(dear) == (3,)
    policy.observe(outcome((7,), (3,), (3,)))
    assert policy.lengths(dear) == (0,) and policy.copy_lengths(dear) == (4,)
    cheap = replace(dear, needs_clock=False)
    assert policy.lengths(cheap) == (4,) and policy.copy_lengths(cheap) is None


def test_own_acceptance_forgets_finished_requests() -> None:
    policy = OwnAcceptance()
    step(policy, 0, ended=True)
    policy.forget((0,))
    assert not policy._trust and step(policy, 0) == 3


@pytest.mark.parametrize("policy", [Constant(4), HfHeuristic(), BassHeuristic(), CostModel(), OwnAcceptance()])
def test_room_is_never_exceeded(policy: Policy) -> None:
    for rooms in ((0, 3, 1), (2, 0, 0), (0, 0, 0), (1, 1, 40)) * 8:
        lengths = policy.lengths(view(0, 1, 2, rooms=rooms))
        assert all(0 <= length <= room for length, room in zip(lengths, rooms, strict=True))
        kept = policy.trim(view(0, 1, 2, rooms=rooms), as_draft((9, 9, 9), (0, 1, 2)))
        assert all(0 <= length <= room for length, room in zip(kept, rooms, strict=True))
        policy.observe(outcome((0, 1, 2), kept, kept))


def test_constant() -> None:
    assert Constant(4).lengths(view(0, 1, rooms=(9, 2))) == (4, 2)
    assert Constant(0).lengths(view(0, 1)) == (0, 0)
    assert Constant(4).trim(view(0, 1), as_draft((3, 0), (0, 0))) == (3, 0)


def test_as_policy() -> None:
    assert isinstance(as_policy("auto"), CostModel)
    assert repr(as_policy(3)) == "Constant(3)"
    own = HfHeuristic()
    assert as_policy(own) is own


@pytest.mark.parametrize("wrong", ["automatic", -1, True, 2.5, None])
def test_as_policy_names_the_remedy(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match=r"give auto|integer"):
        as_policy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: HfHeuristic(start=0),
        lambda: HfHeuristic(decrease=-1),
        lambda: HfHeuristic(persistent="no"),  # type: ignore[arg-type]
        lambda: OwnAcceptance(start=0),
        lambda: BassHeuristic(l0=40),
        lambda: BassHeuristic(modulus=0),
        lambda: CostModel(max_length=0),
        lambda: CostModel(exploration=1.5),
    ],
)
def test_wrong_settings_are_refused(make: object) -> None:
    with pytest.raises(InvalidArgument, match="must be"):
        make()  # type: ignore[operator]


def test_trim_reads_lengths_not_tokens() -> None:
    draft = as_draft((2, 1), (0, 0))
    assert torch.equal(draft.lengths, torch.tensor([2, 1]))
    assert HfHeuristic().trim(view(0, 1), draft) == (2, 1)
