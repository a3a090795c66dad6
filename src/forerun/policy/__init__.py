"""How long the next draft should be."""

from __future__ import annotations

from forerun.arguments import integer, refuse
from forerun.policy.auto import Auto, CostModel
from forerun.policy.base import Policy, wrapped
from forerun.policy.heuristics import BassHeuristic, Constant, HfHeuristic, OwnAcceptance

__all__ = ["Auto", "BassHeuristic", "Constant", "CostModel", "HfHeuristic", "OwnAcceptance", "Policy", "as_policy"]


NAMED: dict[str, type[Policy]] = {"auto": Auto, "hf": HfHeuristic, "bass": BassHeuristic}


def as_policy(value: str | int | Policy) -> Policy:
    """A policy by its name, a constant draft length, or a policy as it is."""
    if isinstance(value, str):
        if value in NAMED:
            return NAMED[value]()
        if not value.isdecimal() or len(value) > 18:
            refuse("policy", value, f"give {', '.join(NAMED)}, a draft length such as 4, or a policy")
        value = int(value)
    if hasattr(value, "__index__"):
        return Constant(
            integer("policy", value, 0, remedy="a draft length is an integer >= 0; 0 decodes without drafting")
        )
    policy: Policy = wrapped(value).unwrapped
    return policy
