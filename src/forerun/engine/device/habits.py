"""Which sizes are worth recording: one that is asked for now and then is stood in for by a larger one that is there.

Recording takes as long as a dozen rounds, as hundreds where kernels have to be compiled first. Towards the end of a
text drafts get shorter and batches smaller, a few rounds of each size; a row or a drafted token more costs those rounds
a few percent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Habits:
    """Sizes of several kinds, and how often each was asked for."""

    patience: int  # rounds in which a larger size may stand in
    _asked: Counter[tuple[Hashable, int]] = field(default_factory=Counter)
    _known: dict[Hashable, set[int]] = field(default_factory=dict)

    def choose(self, kind: Hashable, wanted: int, roomy: int, meant: bool = False) -> int:
        """`wanted` once it is a habit, until then the next larger size that is known, or else `roomy` from now on.

        A size that is `meant` was chosen for its own sake and needs no habit.
        """
        known = self._known.setdefault(kind, set())
        self._asked[kind, wanted] += 1
        if meant or self._asked[kind, wanted] > self.patience:
            known.add(wanted)
        chosen = min((size for size in known if size >= wanted), default=roomy)
        known.add(chosen)
        return chosen
