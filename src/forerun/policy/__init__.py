"""How long the next draft should be."""

from __future__ import annotations

from forerun.arguments import integer, methods, refuse
from forerun.policy.auto import CostModel
from forerun.policy.by_name import Auto
from forerun.policy.constant import Constant
from forerun.policy.heuristics import BassHeuristic, HfHeuristic, OwnAcceptance
from forerun.types import Policy

__all__ = ["Auto", "BassHeuristic", "Constant", "CostModel", "HfHeuristic", "OwnAcceptance", "as_policy"]


def as_policy(value: str | int | Policy) -> Policy:
    """`"auto"`, a constant draft length, or a policy as it is."""
    if isinstance(value, str):
        if value != "auto":
            refuse("policy", value, 'the only name is "auto"; give that, an integer or a policy')
        return Auto()
    if hasattr(value, "__index__"):
        return Constant(
            integer("policy", value, 0, remedy="a draft length is an integer >= 0; 0 decodes without drafting")
        )
    policy: Policy = methods(
        "policy", value, ("lengths", "trim", "observe"), 'needs lengths, trim and observe; or give "auto" or an integer'
    )
    return policy
