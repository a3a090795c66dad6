"""When a trial that is not expected to pay may be made all the same."""

from __future__ import annotations

import pytest

from forerun.policy.trust import FAILURES, Trial, Trust

CLASS, OTHER = 3, 4


def test_a_class_that_failed_often_enough_no_longer_lives_on_credit() -> None:
    trust = Trust(share=0.01)
    for _ in range(FAILURES):
        assert trust.trial(1.0, CLASS) == Trial(CLASS, on_credit=True)
        trust.conclude(Trial(CLASS, on_credit=True), gain=-0.5, kept=0)
    assert trust.trial(1.0, CLASS) is None
    assert trust.trial(1.0, OTHER) == Trial(OTHER, on_credit=True), "the credit is still there"


@pytest.mark.parametrize(("gain", "kept"), [(0.5, 1.0), (-0.5, 0.5)], ids=["it paid", "something was kept"])
def test_only_failures_without_anything_kept_are_counted(gain: float, kept: float) -> None:
    trust = Trust(share=0.01)
    for _ in range(2 * FAILURES):
        trust.conclude(Trial(CLASS, on_credit=True), gain, kept)
    assert trust.trial(1.0, CLASS) == Trial(CLASS, on_credit=True)
