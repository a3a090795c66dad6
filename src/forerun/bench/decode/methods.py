"""What takes turns: plain decoding, fixed draft lengths, BASS's rule, and what Forerun does by itself."""

from __future__ import annotations

from typing import Any

from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.drafters.base import Drafter
from forerun.policy import BassHeuristic, Constant, CostModel
from forerun.policy.base import PlainPolicy, Policy
from forerun.types import RoundOutcome

PLAIN, BASS, AUTO = "plain", "BASS", "auto"
FIXED = {f"fixed {n}": n for n in (4, 6, 8)}
METHODS = (PLAIN, *FIXED, BASS, AUTO)


def policy_of(method: str, auto: Policy) -> Policy:
    """A new one, as BASS begins anew with every call; `auto` goes on learning."""
    if method in FIXED:
        return Constant(FIXED[method])
    if method == PLAIN:
        return Constant(0)
    return auto if method == AUTO else BassHeuristic()


class WatchedPolicy(PlainPolicy):
    """A policy, and what it was told of every round."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.outcomes: list[RoundOutcome] = []

    @property
    def unwrapped(self) -> WatchedPolicy:
        return self

    def for_seed(self) -> WatchedPolicy:
        """Itself: whoever watches a call made it for that call."""
        return self

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)
        super().observe(outcome)


class Decoders:
    """One decoder that drafts and one that does not, kept for the whole run as a user would keep them."""

    def __init__(self, target: Any, draft: Any, **options: Any) -> None:
        self.plain = SpeculativeDecoder(target, None, policy=0, **options)
        drafter = draft if isinstance(draft, Drafter) else DraftModel(draft)
        self.drafting = SpeculativeDecoder(target, drafter, **options)
        self.auto = CostModel()  # what the name stands for where no seed is named: the bench names one

    def watched(self, method: str) -> tuple[SpeculativeDecoder, WatchedPolicy]:
        """The decoder of a method, ready for a call, and what will see its rounds."""
        decoder = self.plain if method == PLAIN else self.drafting
        watched = WatchedPolicy(policy_of(method, self.auto))
        decoder.engine.policy = watched
        return decoder, watched
