"""Rounds on the host's side: what a policy is told beforehand, a round step by step, and what is left of one behind it.

Those that the device runs by itself are sent off in `engine.launching`, and end here as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count

from forerun.cache.base import CacheFull
from forerun.engine.branching import Kept, scored_block
from forerun.engine.commit import VerifiedRound, commit
from forerun.engine.host_round import run as run_on_host
from forerun.engine.pair import Pair
from forerun.engine.roster import Roster
from forerun.engine.row import Progress, Row
from forerun.types import BatchView

SHARE = 0.4  # of the device's time for its own rows: what rounds of the others may add to it
MOST_ROUNDS = 8  # rounds of the device's rows that the others wait for at most, however long their own take


class HostShare:
    """How often rows that need the host get a round: counts the device's time since the last round on the host.

    Both kinds of rounds read all of the target's weights and take turns, so rows that need the host would cost their
    neighbours as much as they take themselves if each had a round in every step.
    """

    def __init__(self) -> None:
        self._host_seconds = 0.0  # of the last round on the host
        self._device_seconds, self._device_rounds = 0.0, 0  # since then

    @property
    def is_due(self) -> bool:
        """Whether the rows that need the host may have their round."""
        return self._device_rounds >= MOST_ROUNDS or self._device_seconds * SHARE >= self._host_seconds

    def add_device_round(self, seconds: float) -> None:
        self._device_seconds += seconds
        self._device_rounds += 1

    def add_host_round(self, seconds: float) -> None:
        self._host_seconds = seconds
        self._device_seconds, self._device_rounds = 0.0, 0


class Rounds:
    """Of the rows in a roster."""

    def __init__(self, pair: Pair, roster: Roster) -> None:
        self.pair, self.roster, self.target = pair, roster, pair.target
        self.share = HostShare()
        self.most_drafted = sys.maxsize  # that rounds were recorded for, where there was a warm-up
        self._numbers = count(1)

    def view(self, batch: list[Row], sizes: tuple[int, ...] = ()) -> BatchView:
        """What a recorded round takes hardly depends on its rows: what is left of them, or unread, decides nothing.

        Where first tokens are drawn from prompts' own passes, no first round has a draft, whoever reads the prompt: how
        many tokens a row gains in a round, and so what it draws, must not depend on its neighbours.
        """
        drafting, runner = self.pair.drafting, self.pair.runner
        is_behind = bool(sizes) and runner is not None and runner.has_pending  # a round of the same rows
        most = [
            0 if self.roster.is_plain or (row.begins_plain and not row.round and not is_behind) else row.most_drafted
            for row in batch
        ]
        return BatchView(
            tuple(row.number for row in batch),
            tuple(row.handle for row in batch),
            tuple(min(length, self.most_drafted) for length in most),
            drafting.is_mixed,
            sizes,
            next(self._numbers),
            () if sizes else self._tokens_left(batch),
            () if sizes else drafting.unread(batch),
            drafting.needs_clock,
        )

    def _tokens_left(self, batch: list[Row]) -> tuple[int, ...]:
        """Of rows that end by their budgets alone and leave their places to nobody; else nothing."""
        is_whole = not self.roster.waiting and len(batch) == len(self.roster.running)
        return tuple(row.remaining for row in batch) if is_whole and all(row.ends_by_budget for row in batch) else ()

    def run_on_host(self, rows: list[Row], *, beside_device: bool) -> VerifiedRound | None:
        """A round step by step; none where its keys find no room beside those of rounds under way.

        What the device has done in this step has been told to the policy: it must not be taken back and done again.
        """
        runner = self.pair.runner
        if runner is not None:
            runner.wait()  # a round is timed by the clock: the device's own come before it
            runner.note_plain_round()
        self.roster.is_crowded = False
        is_beside = runner is not None and (beside_device or runner.has_pending)
        try:
            with nullcontext() if is_beside else self.pair.memory_as_room():
                done = run_on_host(rows, self.view(rows), self.pair)
        except CacheFull:
            if not is_beside:
                raise
            self.roster.is_crowded = True  # nothing more is sent off, so that the next step can make room
            self.roster.rewind_to_history(rows)
            return None
        self.share.add_host_round(done.seconds.decoding)
        return done

    def commit(self, done: VerifiedRound) -> list[Progress]:
        """Rows gain their tokens; target and drafter are cut back to what was kept."""
        drafting, started = self.pair.drafting, self.pair.clock()
        if drafting.takes_predictions and done.evidence is not None:
            done.predicted = drafting.are_predictions(done.evidence)
        progress = commit(done)
        if done.on_device:
            runner = self.pair.runner
            assert runner is not None
            runner.sync_lengths(done, progress)
            if not runner.drafts or drafting.finds_copies:
                lengths = [len(row.history) - 1 for row in done.rows]
                drafting.notify("rewind", [row.number for row in done.rows], lengths)
            return progress
        if done.trees is not None:
            self._keep_paths(done.rows, done.trees, done.kept)
        done.seconds.verify += self.pair.clock() - started  # a round on the device is timed by the device
        self._rewind_to_kept(done, progress)
        return progress

    def _keep_paths(self, rows: list[Row], trees: list[list[int]], kept: list[Kept]) -> None:
        """The accepted path of each tree becomes the row's text; the keys of other branches go."""
        for row, parents, path in zip(rows, trees, kept, strict=True):
            if parents:
                self.target.keep(row.number, self.target.length(row.number) - len(parents), path.nodes)

    def _rewind_to_kept(self, done: VerifiedRound, progress: Sequence[Progress]) -> None:
        """Cut target and drafter back to what stands: everything in the history but its last token has been seen.

        A rule may have emitted other tokens than were scored; from the first of those on nothing has been.
        """
        numbers, lengths = [row.number for row in done.rows], []
        for row, block, kept, gained in zip(done.rows, done.blocks, done.kept, progress, strict=True):
            scored = scored_block(block, kept, done.trees)[1:]
            lengths.append(len(row.history) - 1 - _unscored(scored, gained.tokens[:-1]))
        self.target.rewind(numbers, [min(n, self.target.length(r)) for r, n in zip(numbers, lengths, strict=True)])
        self.pair.drafting.notify("rewind", numbers, lengths)


def _unscored(drafted: list[int], emitted: tuple[int, ...]) -> int:
    """How many of the emitted tokens come at or after the first that is not the draft's."""
    if emitted == tuple(drafted[: len(emitted)]):
        return 0
    same = next(i for i, token in enumerate(emitted) if i >= len(drafted) or token != drafted[i])
    return len(emitted) - same
