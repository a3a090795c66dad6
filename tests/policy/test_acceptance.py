"""What verified drafts teach about the next: by class, and never to the point of certainty."""

from __future__ import annotations

import pytest

from forerun.policy.acceptance import FIRST_GUESS, Acceptance

PLACES = 4


def test_what_a_row_that_ended_left_unkept_was_not_rejected() -> None:
    """One of three tokens was kept: the second was rejected, unless a stop came first."""
    tried = {}
    for ended in (False, True):
        acceptance = Acceptance(PLACES)
        acceptance.observe(7, evidence=3, drafted=3, accepted=1, ended=ended)
        tried[ended] = acceptance.trials(3)
        assert (acceptance.rate(3) > FIRST_GUESS) == ended
    assert tried[True] == pytest.approx(1) and tried[False] == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize(("kept", "bound"), [(0, 0.001), (PLACES, 0.995)], ids=["never", "always"])
def test_no_token_is_taken_for_certain(kept: int, bound: float) -> None:
    """A chance of 0 or 1 would stay there, whatever a row's own luck says."""
    acceptance = Acceptance(PLACES)
    for request in range(1000):
        acceptance.observe(request, evidence=3, drafted=PLACES, accepted=kept, ended=False)
    first, second = acceptance.survival(-1, evidence=3, length=2)
    assert first == pytest.approx(bound)
    assert kept == 0 or second == pytest.approx(bound**2)
    acceptance.observe(-1, evidence=3, drafted=1, accepted=int(kept == 0), ended=False)
    (own,) = acceptance.survival(-1, evidence=3, length=1)
    assert own > 1.4 * first if kept == 0 else 1 - own > 1.4 * (1 - first), "one surprise moves its row"
