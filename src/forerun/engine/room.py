"""Room for rows: for their keys, which is counted, and for passes beside them, which is found out by trying."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.base import CacheFull
from forerun.engine.admission import Admission
from forerun.engine.memory import MemoryFull, RowLimit, drop_tensors
from forerun.engine.pair import Pair
from forerun.engine.roster import Roster
from forerun.engine.row import Row
from forerun.errors import OutOfMemory, kind_and_line

MEMORY_IS_SHORT = "the newest row waits until others have ended, and one that is alone is tried once more"


class Room:
    """Says who may run, and sends rows back to wait where it was too little."""

    def __init__(self, pair: Pair, roster: Roster) -> None:
        self.pair, self.roster = pair, roster
        self.admission, self.row_limit = Admission(), RowLimit()

    def can_run(self, new: Row | None = None) -> bool:
        """Whether running rows can go on, and a new one beside them; kept rows have to go if that helps."""
        while not self.admission.fits(self.pair.caches, self.roster.running.values(), new):
            if not self.roster.prefixes.evict():
                return False
            self.roster.let_go()
            self.admission.recount()
        return True

    def can_admit(self, new: Row, max_rows: int | None) -> bool:
        """A row that is alone is always taken in: `add` has refused those that would not fit then."""
        if not self.roster.running:
            if new.request.source is not None:
                self.can_run(new)  # or kept rows go, and what they read: this one's source is given its memory now
            return True
        limits = (max_rows, self.row_limit.most)
        return all(most is None or len(self.roster.running) < most for most in limits) and self.can_run(new)

    def preempt_for_keys(self) -> bool:
        """Behind a round that found none: the newest row waits, and one that is alone goes without a draft."""
        if len(self.roster.running) > 1:
            self.roster.preempt_newest()
            return True
        if self.roster.is_plain:
            return False
        self.roster.is_plain = True
        self.roster.rewind_to_history(self.roster.running.values())
        return True

    def preempt_for_memory(self, error: CacheFull) -> bool:
        """Behind a pass that ran out of memory: the newest row waits, and one that is alone is tried once more.

        False where that was done already, or where all rows have to begin again from their texts.
        """
        target, rows = self.pair.target, list(self.roster.running.values())
        if len(rows) == 1 and self.row_limit.failures_alone:
            return False
        without_keys = [row for row in rows if target.length(row.number) < len(row.history) - 1]
        if without_keys and target.observers:
            return False
        self._report(error)
        for row in without_keys:  # perhaps of a prompt that came along: in passes of bounded size from now on
            row.is_reading = True
        if len(rows) > 1:
            self.row_limit.lower(len(rows) - 1)
            self.roster.preempt_newest()
        else:
            self.row_limit.failures_alone += 1
            self.roster.rewind_to_history(rows)
        return True

    def go_on_with_fewer(self, error: BaseException, running: Sequence[Row]) -> None:
        """All rows begin again from their texts, half as many at once. Raises where one that is alone has failed twice.

        Half: each try reads all texts anew.
        """
        drop_tensors(error)
        cause = error.__cause__ or error if isinstance(error, MemoryFull) else error
        is_alone = len(running) <= 1
        if is_alone and self.row_limit.failures_alone:
            row = next(iter((*running, *self.roster.waiting)), None)
            raise OutOfMemory(
                f"memory ran out twice for a row that runs alone ({kind_and_line(cause)}): shorten its prompt, ask for "
                "shorter drafts, or give the decoder fewer cache_tokens, which leaves more beside the keys",
                None if row is None else row.handle,
            ) from cause
        self._report(cause)
        self.row_limit.failures_alone += is_alone
        self.row_limit.lower(len(running) // 2)

    def _report(self, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error, MemoryFull) else error
        assert isinstance(cause, Exception)
        self.pair.faults.report(self.pair.target.model, cause, MEMORY_IS_SHORT)

    def free_unused(self) -> None:
        """What nobody needs: keys of rows that have ended, and what torch keeps for later."""
        while self.roster.prefixes.evict():
            pass
        self.roster.let_go()
        if self.pair.target.device.type == "cuda":
            torch.cuda.empty_cache()
