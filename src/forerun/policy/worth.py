"""What kept tokens are worth to a call, which ends with its slowest row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worth:
    """In tokens that all rows gain evenly: one more for each of them is worth as many as there are rows.

    Part of a plain round takes as long for few rows as for all (`fixed`, a share). A row that gets ahead of the others
    ends earlier and saves them its own part of some rounds; whole rounds are saved as far as the slowest row gets. So
    tokens of several rows that end together are worth more than the sum of what each of them is worth alone.
    """

    tokens_left: Sequence[int] = ()  # empty where nobody knows when rows end: all tokens are worth the same then
    fixed: float = 0.0

    def of(self, kept: Sequence[float]) -> float:
        """Of so many tokens a row, on top of the one that each gains in any case."""
        return self._of(kept, self._ahead(kept)) if self.tokens_left else sum(kept)

    def expected(self, kept: Sequence[float]) -> float:
        """Of so many on average: of several rows that must all get ahead, one will get less far than that."""
        if not self.tokens_left:
            return sum(kept)
        ahead, slowest = self._ahead(kept), max(self.tokens_left)
        needed = sum(tokens > slowest - ahead for tokens in self.tokens_left)
        return self._of(kept, ahead / math.sqrt(max(needed, 1)))

    def expected_along(self, tokens: Iterable[tuple[int, float]], rows: int) -> Iterator[float]:
        """`expected` after each of these tokens (its row, its chance), without walking all rows for every one."""
        total = 0.0
        if not self.tokens_left:
            for _, chance in tokens:
                total += chance
                yield total
            return
        left, slowest = [float(tokens) for tokens in self.tokens_left], max(self.tokens_left)
        most, rounds = float(slowest), 0.0
        for row, chance in tokens:
            total += chance
            before = left[row]
            left[row] -= chance
            if before == most and (most := max(left)) != before:
                needed = sum(tokens > most for tokens in self.tokens_left)
                rounds = (slowest - most) / math.sqrt(max(needed, 1))
            yield (1 - self.fixed) * total + self.fixed * rows * rounds

    def _of(self, kept: Sequence[float], ahead: float) -> float:
        return (1 - self.fixed) * sum(kept) + self.fixed * len(kept) * ahead

    def _ahead(self, kept: Sequence[float]) -> float:
        """Rounds that are not needed at all."""
        left = (tokens - row_kept for tokens, row_kept in zip(self.tokens_left, kept, strict=True))
        return max(self.tokens_left) - max(left)

    def weights(self, rows: int) -> list[float]:
        """What a token of each row is worth if the others that end with it get theirs: 1 on average."""
        if not self.tokens_left:
            return [1.0] * rows
        slowest = max(self.tokens_left)
        extra = self.fixed * rows / self.tokens_left.count(slowest)
        return [1 - self.fixed + extra * (tokens == slowest) for tokens in self.tokens_left]
