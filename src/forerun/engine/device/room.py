"""Sizes that recordings are made for, and keys that must have a place before a round is sent off."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.cache.ragged import RaggedCache
from forerun.engine.row import Row
from forerun.models.scorer import Scorer

# Scored for each row. Short ones are exact: each further position costs a batch of eight as much as eight rows.
POSITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 33)
# Drafts that policies are offered, and that stand in for others; each is a recording.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
SHORTEST_SPAN = 1024  # keys; recordings are made for rows up to that length, then up to twice that, and so on
AHEAD = 4096  # the most keys that room is made for before anybody needs it
IN_THE_AIR = 3 * POSITIONS[-1]  # keys that rounds may write past a row's end


def bucket(positions: int) -> int:
    """The next number of positions that rounds are recorded for."""
    return next((size for size in POSITIONS if size >= positions), width(positions))


def width(positions: int) -> int:
    """How wide seats are that hold a round of so many positions."""
    return max(POSITIONS[-1], power(positions - 1) + 1)


def roomy(number: int) -> int:
    """The next of few draft lengths, while nobody knows which ones will be wanted again."""
    return next((size for size in (0, *SIZES) if size >= number), number)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def span(longest: int) -> int:
    """A bound on keys that changes seldom: attention divides its work by it."""
    return max(SHORTEST_SPAN, power(longest))


def keep_room(cache: RaggedCache, rows: Sequence[Row], ends: Sequence[int], final: int) -> None:
    """Room for keys below `ends` of each row; where it has to grow, up to `final`."""
    longest = max(ends)
    if longest > cache.capacity:
        cache.reserve(0, max(longest, wanted(longest, final)))
    for row, end in zip(rows, ends, strict=True):
        cache.set_length(row.number, cache.length(row.number), end)


def wanted(longest: int, final: int) -> int:
    """Keys to have room for at once, for rows that now have up to `longest` tokens and in the end up to `final`."""
    return min(final + IN_THE_AIR, longest + AHEAD)


def fingerprint(scorers: Sequence[Scorer]) -> int:
    """Changes when weights have been replaced, whose addresses recordings hold."""
    return hash(tuple(weight.data_ptr() for scorer in scorers for weight in scorer.weights))
