"""Sizes that rounds are recorded for.

Recording takes as long as a dozen rounds, as hundreds where kernels have to be compiled first. Towards the end of a
text drafts get shorter and batches smaller, a few rounds of each size; a row or a drafted token more costs those rounds
a few percent. So a size that is asked for now and then is replaced by a larger one that is recorded already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from forerun.models.plain import address
from forerun.models.scorer import Scorer

# Scored for each row. Short ones are exact: each further position costs a batch of eight as much as eight rows.
POSITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 33)
# Drafts that policies are offered, and that stand in for others; each is a recording.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
SMALLEST_KEY_BOUND = 1024  # recordings are made for rows up to that many keys, then up to twice that, and so on
PENDING_KEYS = 3 * POSITIONS[-1]  # keys that pending rounds may write past a row's end


@dataclass(slots=True)
class ShapeChooser:
    """Sizes of several kinds, and how often each was asked for."""

    patience: int  # rounds in which a larger size may stand in
    _asked: Counter[tuple[Hashable, int]] = field(default_factory=Counter)
    _known: dict[Hashable, set[int]] = field(default_factory=dict)

    def pick(self, kind: Hashable, size: int, rounded: int, force: bool = False) -> int:
        """`size` once it was asked for often; before, the next larger one that is known, or else `rounded`.

        With `force` the size was chosen for its own sake and is taken at once.
        """
        known = self._known.setdefault(kind, set())
        self._asked[kind, size] += 1
        if force or self._asked[kind, size] > self.patience:
            known.add(size)
        chosen = min((other for other in known if other >= size), default=rounded)
        known.add(chosen)
        return chosen

    def learn(self, kind: Hashable, size: int) -> None:
        """`size` is there, whoever asked for it."""
        self._known.setdefault(kind, set()).add(size)


def bucket(positions: int) -> int:
    """The next number of positions that rounds are recorded for."""
    return next((size for size in POSITIONS if size >= positions), table_width(positions))


def table_width(positions: int) -> int:
    """How wide a row table is that holds a round of so many positions."""
    return max(POSITIONS[-1], next_power_of_two(positions - 1) + 1)


def round_up_draft(length: int) -> int:
    """The next of few draft lengths, until it is known which lengths recur."""
    return next((size for size in (0, *SIZES) if size >= length), length)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def key_bound(longest: int) -> int:
    """A bound on keys that changes seldom: attention divides its work by it."""
    return max(SMALLEST_KEY_BOUND, next_power_of_two(longest))


def fingerprint(scorers: Sequence[Scorer]) -> int:
    """Changes when weights have been replaced, whose addresses recordings hold."""
    return hash(tuple(address(weight) for scorer in scorers for weight in scorer.weights))
