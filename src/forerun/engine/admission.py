"""Which rows may run: those whose keys fit into the caches of target and drafter, with room for the coming round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.cache.base import KeyValueCache, NewRow
from forerun.engine.row import Row
from forerun.errors import InvalidArgument
from forerun.types import Source

FIRST_ROUND = 9  # tokens a row is expected to need in a round, until longer ones have been seen


class Admission:
    """Asks caches, which are the target's and those of the drafter as it is now.

    A row is admitted when its text, what it reads and a round's worth of tokens fit beside all running rows and as much
    for each of them. So a row that has come is not sent away by the round it came for.
    """

    def __init__(self) -> None:
        self._round_tokens = FIRST_ROUND
        self._copied: tuple[int, int] | None = None  # the handle and the length of the row below
        self._prefix: list[int] = []
        self._needs: dict[KeyValueCache, int] = {}  # of the running rows, while newcomers are taken in

    def observe(self, tokens: int) -> None:
        """A row was given so many positions in a round; the next may take as many."""
        self._round_tokens = max(self._round_tokens, tokens)

    def fits(self, caches: Sequence[KeyValueCache], running: Iterable[Row], new: Row | None = None) -> bool:
        """Whether the running rows have room for another round, and a new one beside them."""
        asked = None
        if new is None:
            self.recount()
        bounded = [cache for cache in caches if cache.num_tokens is not None]
        if bounded and new is not None:
            asked = NewRow(self._known(new), new.request.source, self._end(new))
        if any(cache not in self._needs for cache in bounded):
            ends = {row.number: self._end(row) for row in running}
            self._needs = {cache: cache.needs(ends) for cache in bounded}
        has_room = all(cache.takes(self._needs[cache], asked) for cache in bounded)
        if has_room and new is not None:  # it waits no longer
            self._copied, self._prefix = None, []
        return has_room

    def count(self, new: Row) -> None:
        """A row was taken in and has changed nothing for the others: counted beside them, not all of them anew."""
        ends = {new.number: self._end(new)}
        self._needs = {cache: cache.needs(ends, so_far) for cache, so_far in self._needs.items()}

    def recount(self) -> None:
        """Rows have gone, or gained tokens."""
        self._needs = {}

    def check(
        self, caches: Sequence[KeyValueCache], num_prompt: int, budget: int, source: Source | None = None
    ) -> None:
        """Refuse a row that would not fit although it were alone."""
        for cache in caches:
            limit, read = cache.num_tokens, cache.keys_of_source(source)
            total = read + num_prompt + budget
            if limit is not None and total > limit:
                what = f"a prompt of {num_prompt} tokens and up to {budget} new ones are {total} tokens"
                remedy = "ask for fewer new tokens"
                if read:
                    what = f"a source of {read} encoded positions, " + what
                    remedy = "shorten the source, " + remedy
                raise InvalidArgument(
                    f"{what}, and the cache has room for the keys of {limit}: {remedy}, or give the decoder "
                    f"cache_tokens={total} or more"
                )

    def _known(self, row: Row) -> list[int]:
        """All tokens of a row but its last, copied once: it may be asked about in every step, and be long."""
        of = row.handle, len(row.history)
        if self._copied != of:
            self._copied, self._prefix = of, row.history[:-1]
        return self._prefix

    def _end(self, row: Row) -> int:
        """Keys a row needs for the coming round, in which its last token is the first that is scored."""
        return len(row.history) - 1 + min(self._round_tokens, max(row.remaining, 1))
