"""Rounds that the device runs by itself: which rows have one, and when the next is sent off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.cache.base import CacheFull
from forerun.engine.commit import VerifiedRound
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import SIZES
from forerun.engine.host_draft import HostDraft
from forerun.engine.pair import Pair
from forerun.engine.roster import Roster
from forerun.engine.rounds import Rounds
from forerun.engine.row import Row
from forerun.types import BatchView

# Before the end of a round on the device: when the next is sent off where requests may come meanwhile, and how long the
# host sleeps between two looks for them. Sending off takes a third of the first.
LEAD, NAP = 0.0012, 0.0004


class Launching:
    """Sends recorded rounds off; with `ahead` the next of them before the caller looks at this one."""

    def __init__(self, pair: Pair, roster: Roster, rounds: Rounds, *, ahead: bool) -> None:
        self.pair, self.roster, self.rounds, self.ahead = pair, roster, rounds, ahead

    def send_off(self, batch: Sequence[Row], arrivals: Callable[[], None] | None) -> bool:
        """The round of all rows that the device can run by itself; whether there are any. `arrivals` adds newcomers."""
        runner, drafting = self.pair.runner, self.pair.drafting
        if runner is None:
            return False
        rows = runner.running if runner.has_pending else [row for row in batch if runner.takes(row)]
        if not rows or not (runner.has_pending or self._launch(runner, rows)):
            return False
        if self.ahead and drafting.runs_ahead and runner.should_launch_another(rows):
            if arrivals is not None:
                self._await(runner, arrivals)
            if not self._has_newcomers(runner):
                self._launch(runner, rows)
        drafting.prepare(rows)
        return True

    def _await(self, runner: Runner, arrivals: Callable[[], None]) -> None:
        """Until the next round has to be sent off, lest the device wait: whoever comes after that waits for it, too."""
        while True:
            arrivals()
            left = runner.seconds_left - LEAD
            if left <= 0 or self._has_newcomers(runner):
                return
            time.sleep(min(left, NAP))

    def send_off_behind(self, done: VerifiedRound) -> None:
        """Behind a round on the device, the next one: before the caller looks at this one."""
        runner, running = self.pair.runner, [row for row in done.rows if row.finish_reason is None]
        if self.ahead and done.on_device and running:
            assert runner is not None
            if not self._has_newcomers(runner) and not runner.has_pending:
                self._launch(runner, running)

    def send_off_behind_prompts(self) -> None:
        """Behind first tokens, the round of all rows: newcomers keep nobody from going on."""
        runner = self.pair.runner
        if runner is not None and self.ahead:
            going_on = [row for row in self.roster.decoding if row.finish_reason is None and runner.takes(row)]
            if going_on:
                self._launch(runner, self.roster.in_order(going_on))

    def _has_newcomers(self, runner: Runner) -> bool:
        """Whether the next round on the device may be of other rows than this one."""
        roster = self.roster
        if (roster.waiting and not roster.is_blocked) or roster.is_crowded or roster.reading:
            return True
        present = {row.handle for row in runner.running}
        return any(row.handle not in present and runner.may_take(row) for row in roster.running.values())

    def _launch(self, runner: Runner, batch: list[Row]) -> bool:
        """Send a round to the device, if it is one that the device can run by itself."""
        if not all(map(runner.takes, batch)):
            return False
        drafting, view, host_draft = self.pair.drafting, self.rounds.view(batch, SIZES), None
        if drafting.finds_copies:
            host_draft = self._find(runner, batch, view)
            if host_draft is None:
                return False
        lengths = drafting.lengths(view) if host_draft is None else host_draft.lengths
        if not runner.drafts and any(lengths if host_draft is None else host_draft.drawn):
            return False
        if runner.may_reach_forced_token(batch, lengths):
            return False
        if runner.needs_new_table(batch, lengths):
            if runner.has_pending:
                return False
            self.roster.let_go()  # whose slots others can have
        elif not runner.may_follow(lengths):
            return False
        try:
            runner.launch(batch, lengths, view, drafting.is_fixed, host_draft)
        except CacheFull:  # for a second round, or for one that is shorter step by step
            return False
        except Exception as error:
            runner.disable(error)
            return False
        return True

    def _find(self, runner: Runner, batch: list[Row], view: BatchView) -> HostDraft | None:
        """Copies for the coming round; None where it has to wait for the one under way, or to go step by step.

        While a round is under way, copies are looked for behind the text as far as it is known. If one is worth
        verifying, what is left of it is looked for again once that round's tokens are there; if none is, the coming
        round is sent off without a copy. With a fixed length every round has the copy that it would have had.
        """
        drafting = self.pair.drafting
        if not runner.has_pending:
            return drafting.host_draft(batch, view)
        under_way, host_draft = runner.pending[-1].host_draft, None
        if under_way is not None and under_way.guesses is None and not drafting.is_fixed:
            host_draft, under_way = drafting.host_draft(batch, view), under_way.of_running()
            if host_draft is None or [id(row) for row in under_way.rows] != [id(row) for row in batch]:
                return None
            under_way = replace(under_way, copies=host_draft.copies, guesses=host_draft.guesses)
            runner.pending[-1].host_draft = under_way
        drawn = drafting.lengths(view) if host_draft is None else host_draft.drawn
        if under_way is None or under_way.has_copies or (drafting.is_fixed and any(drawn)):
            return None
        return drafting.without_copies(batch, drawn if view.is_mixed else (0,) * len(batch))
