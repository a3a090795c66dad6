"""Every engine has a drafter of its own: whoever is given one works with its like, which has no rows yet."""

from __future__ import annotations

from typing import TypeVar

from forerun.types import Drafter

D = TypeVar("D", bound=Drafter)


def has_fresh(drafter: Drafter | None) -> bool:
    """Whether its own class says so: one that hands everything on to another would give that one in its own place."""
    return hasattr(type(drafter), "fresh")


def fresh(drafter: D) -> D:
    """One that drafts alike, shares the weights and knows neither rows nor a target; itself where it has no `fresh`."""
    if not has_fresh(drafter):
        return drafter
    made: D = drafter.fresh()  # type: ignore[attr-defined]
    return made
