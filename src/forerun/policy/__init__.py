"""How long the next draft should be."""

from __future__ import annotations

from forerun.arguments import integer, refuse
from forerun.policy.auto import Auto, CostModel
from forerun.policy.base import Policy, wrapped
from forerun.policy.heuristics import BassHeuristic, Constant, HfHeuristic, OwnAcceptance

__all__ = ["Auto", "BassHeuristic", "Constant", "CostModel", "HfHeuristic", "OwnAcceptance", "Policy", "as_policy"]


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
    policy: Policy = wrapped(value).unwrapped
    return policy
