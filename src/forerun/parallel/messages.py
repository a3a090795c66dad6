"""What rank 0 tells the other ranks, beside passes and calls (`PassCall`, `RecordedCall` and `ModelCall` of
`models.sharded`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.models.sharded import MakeFollower


@dataclass(frozen=True, slots=True)
class Meet:
    """Answer: rank 0 waits until all ranks are listening."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model together; the arguments are those of `forerun.loading.load_shard`."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unload:
    """A model that was loaded together is not wanted any more."""

    model: int


@dataclass(frozen=True, slots=True)
class Split:
    """A split model among the arguments of a `ModelCall`: each rank puts in its own part."""

    model: int  # counted in the order in which models were connected, which is the same on all ranks


@dataclass(frozen=True, slots=True)
class Open:
    """Make the counterpart of a scorer."""

    scorer: int
    model: int  # as in `Split`
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Follow:
    """Make what follows a recorder of a scorer's passes, and answer why that cannot be, or None."""

    follower: int
    scorer: int
    make: MakeFollower


@dataclass(frozen=True, slots=True)
class Close:
    """Scorers and recorders of rank 0 that are gone."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call that all ranks have made returns on each of them, or the error it raises there."""

    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """There will be no more passes."""
