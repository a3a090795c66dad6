"""Every engine has a drafter of its own: whoever is given one works with its like, which has no rows yet."""

from __future__ import annotations

from typing import TypeVar

from forerun.types import Drafter

D = TypeVar("D", bound=Drafter)


def fresh(drafter: D) -> D:
    """One that drafts alike, shares the weights and knows neither rows nor a target; itself where it has no `fresh`."""
    make = getattr(drafter, "fresh", None)
    if make is None:
        return drafter
    made: D = make()
    return made
