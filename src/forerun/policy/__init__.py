"""How long the next draft should be."""

from __future__ import annotations

from forerun.errors import InvalidArgument
from forerun.policy.auto import CostModel
from forerun.policy.by_name import Auto
from forerun.policy.constant import Constant
from forerun.policy.heuristics import BassHeuristic, HfHeuristic
from forerun.types import Policy

__all__ = ["Auto", "BassHeuristic", "Constant", "CostModel", "HfHeuristic", "as_policy"]


def as_policy(value: str | int | Policy) -> Policy:
    """`"auto"`, a constant draft length, or a policy as it is."""
    if isinstance(value, str):
        if value != "auto":
            raise InvalidArgument(f'policy={value!r}: the only name is "auto"; give that, an integer or a policy')
        return Auto()
    if isinstance(value, int):
        return Constant(value)
    if not all(callable(getattr(value, name, None)) for name in ("lengths", "trim", "observe")):
        raise InvalidArgument(f'policy={value!r}: needs lengths, trim and observe; or give "auto" or an integer')
    return value
