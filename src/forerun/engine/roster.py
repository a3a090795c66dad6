"""Who runs and who waits, by which numbers target and drafter know running rows, and whose keys are kept."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from heapq import heappop, heappush

from forerun.engine.pair import Pair
from forerun.engine.prefix_cache import PrefixCache
from forerun.engine.request import FinishReason
from forerun.engine.row import Row, RowResult
from forerun.models.fingerprint import checksum


class Roster:
    """Rows in flight behind one target, the keys of some that have ended, and results that nobody has taken yet.

    A row that runs has a number, which it keeps until it leaves; where it is kept as a prefix, until that goes.
    """

    def __init__(self, pair: Pair, keep_rows: int) -> None:
        self.pair, self.target = pair, pair.target
        self.prefixes = PrefixCache(keep_rows)
        self.waiting: list[Row] = []
        self.running: dict[int, Row] = {}  # by number
        self.aborted: set[int] = set()  # handles of rows that are to end
        self.results: dict[int, RowResult] = {}  # by handle
        self.is_blocked = False  # whether the first of the waiting rows has to wait until another leaves
        self.is_crowded = False  # whether rounds under way have left no room for one of the others
        self.is_plain = False  # whether the round under way goes without drafts, because there was no room for any
        self.num_preempted = 0  # how often a running row had to wait again because keys or memory ran out
        # Tokens of prompts that were looked for among keys which other rows had made, and those that were found there.
        self.num_prefix_queries = self.num_prefix_hits = 0
        self._values: list[int] = []  # of the weights that made the kept keys
        self._held: set[int] = set()  # row numbers that target and drafter know, kept prefixes included
        self._free: list[int] = []  # a heap of those below some held one; both together are all from 0 on

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    @property
    def rows(self) -> list[Row]:
        """All in flight."""
        return [*self.waiting, *self.running.values()]

    @property
    def reading(self) -> list[Row]:
        """Rows whose prompts have not been read, or whose first tokens are still to be drawn."""
        return [row for row in self.running.values() if row.is_reading]

    @property
    def decoding(self) -> list[Row]:
        return [row for row in self.running.values() if not row.is_reading]

    @property
    def unjudged(self) -> list[Row]:
        """Rows whose prompts have been read to their ends: a first token is to be drawn from the logits there."""
        return [row for row in self.running.values() if row.first_logits is not None]

    def in_order(self, rows: Iterable[Row]) -> list[Row]:
        """As their keys lie."""
        return sorted(rows, key=lambda row: self.target.cache.slot(row.number))

    def take_in(self, row: Row, now: float) -> None:
        """A row that waits runs from now on, though its prompt is still to be read."""
        self._number(row)
        row.is_reading, row.first_logits = True, None
        row.waited = now - row.added if row.waited is None else row.waited
        self.running[row.number] = row
        self.waiting.remove(row)

    def _number(self, row: Row) -> None:
        """That of a kept prefix whose keys begin as the row's prompt does, or else a new one."""
        drafting, runner = self.pair.drafting, self.pair.runner
        if runner is not None and not runner.has_pending:
            runner.release_table()  # entries without a row write where nobody was: the new row may be there now
        claim = self.prefixes.claim(row.request.prompt, row.request.source)
        self.num_prefix_queries += 0 if row.round else len(row.request.prompt)
        if claim is not None:
            row.number, known = claim
            self.target.rewind([row.number], [min(known, self.target.length(row.number))])
            self._count_hits(row, self.target.length(row.number))
            drafting.notify("rewind", [row.number], [known])
            drafting.predict(row)
            return
        row.number = heappop(self._free) if self._free else len(self._held)
        self._held.add(row.number)
        self.target.admit(row.number)
        drafting.notify("admit", row.number, row.request.prompt)
        if row.request.source is not None:
            self.target.read(row.number, row.request.source)
            drafting.notify("read", row.number, row.request.source)
        drafting.predict(row)
        self.begin(row)

    def begin(self, row: Row) -> None:
        """With the keys that are known of its text."""
        self._count_hits(row, self.target.begin(row.number, row.history[:-1]))

    def copy(self, source: Row, row: Row, length: int) -> None:
        """Give `row` the first keys of one whose text begins alike."""
        had = self.target.length(row.number)
        self.target.copy(source.number, row.number, length)
        self._count_hits(row, self.target.length(row.number) - had)

    def _count_hits(self, row: Row, tokens: int) -> None:
        """Those of a row that was preempted are its own."""
        self.num_prefix_hits += 0 if row.round else tokens

    def preempt_newest(self) -> None:
        """The newest row waits again, before all others, and is computed anew from its text when there is room.

        It keeps what it has: output, round, stops, grammar. So it draws no random number twice.
        """
        newest = max(self.running.values(), key=lambda row: row.handle)
        newest.first_logits = None  # a view of all prompts' logits
        self.target.remember(newest.number, newest.history)
        del self.running[newest.number]
        self.waiting.insert(0, newest)
        self.is_blocked, self.is_crowded = True, False  # it may have been the one that found no room
        self.num_preempted += 1
        self.let_go()
        self.rewind_to_history(self.running.values())  # others may have been in the middle of a round

    def rewind_to_history(self, rows: Iterable[Row]) -> None:
        """Forget all keys of a round that did not come to its end."""
        lengths: dict[int, int] = {}
        for row in rows:
            row.first_logits = None
            lengths[row.number] = len(row.history) - 1
        self.target.rewind(list(lengths), [min(n, self.target.length(r)) for r, n in lengths.items()])
        self.pair.drafting.notify("rewind", list(lengths), list(lengths.values()))

    def retire(self) -> None:
        """Let finished rows go."""
        for row in self.rows:
            if row.handle in self.aborted and row.finish_reason is None:
                row.finish_reason = FinishReason.ABORT
        self.aborted.clear()
        leaving = [row for row in self.running.values() if row.finish_reason is not None]
        ended = [*leaving, *(row for row in self.waiting if row.finish_reason is not None)]
        if ended:
            results = {row.handle: row.result(self.pair.clock()) for row in ended}
            waiting = [row for row in self.waiting if row.finish_reason is None]
            running = {number: row for number, row in self.running.items() if row.finish_reason is None}
            # Without a call between them, before anything that may fail: nobody's result is lost, or there twice.
            self.results |= results
            self.waiting, self.running = waiting, running
            self.is_blocked = self.is_crowded = False
        is_forgotten = self.is_empty and not self.prefixes.limit
        for row in sorted(leaving, key=lambda row: -self.target.cache.slot(row.number)):
            if row.error is None and not is_forgotten:
                self._keep(row)
        runner = self.pair.runner
        if runner is not None and runner.has_pending and not runner.running:
            runner.discard_pending()
        if runner is None or not runner.has_pending:  # slots move when a row goes
            self.let_go()
        if self.is_empty:
            self.pair.go_on_training()
        if is_forgotten:  # a model may change now, and nobody looks whether keys are still its weights'
            for cache in self.pair.caches:
                cache.forget()
        if ended:
            self.pair.drafting.forget(tuple(row.handle for row in ended))

    def _keep(self, row: Row) -> None:
        """Let rows to come begin with the keys of one that has ended: by blocks, or as a kept row.

        Whoever listens to hidden states has them for whole rows alone. A source that is no text is equal to itself
        alone: no row to come reads it, and its tensors would be kept for nothing.
        """
        source = row.request.source
        if source is not None and not source.is_text:
            return
        if self.target.cache.reads_in_place or self.target.observers:
            self.prefixes.put(row.number, row.history, source)
        else:
            self.target.remember(row.number, row.history)

    def let_go(self) -> None:
        """Release rows that left, the last slots first: then no keys of remaining rows have to move."""
        going = [number for number in self._held if number not in self.running and number not in self.prefixes]
        if going and self.pair.runner is not None:
            self.pair.runner.release_table()
        for number in sorted(going, key=self.target.cache.slot, reverse=True):
            self.target.release(number)
            self.pair.drafting.notify("release", number)
            self._held.discard(number)
            heappush(self._free, number)

    def start_over(self) -> None:
        """After an error the keys may be wrong: drop them all. All rows wait, to begin again from their texts."""
        rows = {row.handle: row for row in (*self.running.values(), *self.waiting)}
        for row in rows.values():
            row.first_logits = None
        held, self._held, self._free = self._held, set(), []
        self.waiting, self.running, self.is_crowded = list(rows.values()), {}, False
        self.prefixes.clear()
        if self.pair.runner is not None:
            self.pair.runner.discard_pending()
        self.target.reset()
        for number in held:
            with suppress(Exception):  # one error is on its way already
                self.pair.drafting.notify("release", number)
        if self.is_empty:
            self.pair.go_on_training()

    def drop_old_weights_keys(self) -> None:
        """Kept keys, where the weights that made them have other values by now."""
        if self.prefixes.limit:
            values = checksum(self.target.model)
            if values != self._values:
                self.start_over()
                self._values = values
