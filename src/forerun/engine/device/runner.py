"""Which rounds the device can run by itself, how they are launched and how their results are read.

While no round is pending, the host's lengths are the truth: a row has `len(history) - 1` keys in the target's cache,
and the row table is written from that. A pending round advances the table on the device; collecting it brings the host
to the same numbers. Rows outside of the table may have rounds of any other kind meanwhile; those in it only between two
launches, never between launch and collect.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from forerun.cache.base import KeyValueCache, ranges
from forerun.drafters.device import DeviceDrafter, Shape
from forerun.drafters.device_model import DeviceDraftModel
from forerun.drafters.device_ngram import DeviceNgrams
from forerun.drafters.device_tree import DeviceTree
from forerun.engine.branching import Kept, kept_of
from forerun.engine.commit import VerifiedRound
from forerun.engine.device import prompt_passes, row_options
from forerun.engine.device.capture import Work
from forerun.engine.device.ngram_round import NgramRound
from forerun.engine.device.prompt_passes import PromptPasses
from forerun.engine.device.recorder import Marks, Recorder, Recordings, Scratch
from forerun.engine.device.round import DeviceRound
from forerun.engine.device.row_table import RowSlots, RowTable, covering
from forerun.engine.device.shapes import (
    PENDING_KEYS,
    ShapeChooser,
    bucket,
    fingerprint,
    key_bound,
    next_power_of_two,
    round_up_draft,
    table_width,
)
from forerun.engine.device.tree_round import TreeRound
from forerun.engine.host_draft import HostDraft
from forerun.engine.memory import is_out_of_memory
from forerun.engine.row import Progress, Row, TokenLogprob
from forerun.engine.stats import Seconds
from forerun.errors import ForerunWarning, RankLost, UnsupportedModel
from forerun.math.advance import HEAD
from forerun.models import static_pass
from forerun.models.bodies.shard import ShardBody, why_not_captured
from forerun.models.scorer import Scorer
from forerun.models.sharded import RecordedCall, RecordedPass, is_sharded
from forerun.models.static_pass import StaticPass
from forerun.types import BatchView, LawParams, Rule, Verdict

READ_BUFFERS = 3  # one that is read, two of pending rounds
SHRINK_AFTER = 16  # rounds with more dummies than need be before rows move to a smaller table
NEAR = 8  # tokens left, beside two drafts, below which lengths are the budget's rather than the policy's
PAUSE = 64  # rounds step by step after one that memory ran out for; twice as many each time it does so again
MARGIN = 64  # tokens before the end of a draft model's context, from where on rounds are run step by step


@dataclass(frozen=True, slots=True)
class ReadBuffer:
    """Where the result of one pending round arrives on the host."""

    result: Tensor  # `RowTable.result` on the host
    marks: Marks  # before drafting, after drafting, scoring, verifying
    logprobs: dict[int, Tensor] = field(default_factory=dict)  # as `RowTable.logprobs`, by how many alternatives

    def fetch(self, table: RowTable) -> None:
        """Start copying what the host reads of a round; last of all, so that its mark is the round's end."""
        self.result.copy_(table.result, non_blocking=True)
        if table.logprobs is not None and table.alternatives is not None:
            if table.alternatives not in self.logprobs:
                self.logprobs[table.alternatives] = _on_host(table.logprobs)
            self.logprobs[table.alternatives].copy_(table.logprobs, non_blocking=True)
        self.marks.set(3)


@dataclass(slots=True)
class PendingRound:
    """A round that was launched and not yet collected."""

    rows: tuple[Row, ...]
    shape: Shape
    buffer: ReadBuffer
    round_number: int  # of the view its lengths were asked with
    idle_seconds: float | None  # how long the device had waited for it; None where that is not known
    host_draft: HostDraft | None  # what the host found for it, perhaps after it was launched
    alternatives: int | None  # whose log-probabilities were looked up

    @property
    def kind(self) -> Hashable:
        """Rounds that are alike in this take as long as each other, contexts apart."""
        return len(self.buffer.result), self.shape.drafted, self.shape.drawn, self.shape.scored


class Runner:
    """Rounds of recorded work behind one target and at most one drafter."""

    def __init__(
        self,
        target: Scorer,
        drafter: DeviceDrafter | None,
        rule: Rule,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
        *,
        whole_rounds: bool = True,
    ) -> None:
        self.target, self.drafter, self.rule, self.clock = target, drafter, rule, clock
        self.recorder = recorder or Recorder(target.device, None if target.ranks is None else target.ranks.agree)
        self.recordings = Recordings(self.recorder)
        self.pending: deque[PendingRound] = deque()
        self.is_disabled = False  # a recording has failed: nothing is launched any more, or not for a while
        self._paused_for, self._next_pause = 0, PAUSE  # rounds step by step
        self.whole_rounds = whole_rounds  # whether whole rounds can be recorded, not the target's pass alone
        self._scratch, self._hidden = Scratch(), Scratch()
        self._draft_scratches = Scratch(), Scratch()  # as drafts give them, and as options leave them
        self._pass = StaticPass(target)
        self._rounds: dict[tuple[int, int, bool], DeviceRound] = {}
        self._buffers: dict[tuple[int, int, bool], cycle[ReadBuffer]] = {}
        self._round: DeviceRound | None = None  # whose table holds the rows
        self._weights = 0
        self._scored: list[int] = []  # rows of the last pass alone
        self._idle_since: float | None = None  # when the last pending round was collected
        self._began = 0.0  # when the oldest pending round did
        self._took: dict[Hashable, tuple[float, ...]] = {}  # seconds of the last rounds of each kind, two at most
        self._drafts, self._sizes = ShapeChooser(patience=64), ShapeChooser(patience=512)
        self._size = 0  # entries that the table of the coming rounds should have
        # What a warm-up has recorded: kinds of rows (`RowTable.flags`), how many alternatives are looked up, drafts
        # with copies (their length, and what is drawn), tokens of passes alone, a bound on keys that suits all of them.
        self._warm_kinds: set[Hashable] = set()
        self._warm_alternatives: set[int] = set()
        self._warm_copies: set[tuple[int, int]] = set()
        self._warm_counts: set[int] = set()
        self._prompt_passes: list[PromptPasses] = []
        self._warm_bound, self._lengths_before = 0, tuple[int, ...]()
        # Of a split target: what repeats passes on other ranks, by its number, and the end of the last one here.
        self._follower: tuple[int, Marks] | None = None
        self._oversized = 0  # consecutive rounds for which a smaller table would have done

    @property
    def drafts(self) -> bool:
        """Whether recorded rounds draft by themselves; if not, the host gives them drafts, or they have none."""
        return self.drafter is not None

    @property
    def has_pending(self) -> bool:
        return bool(self.pending)

    @property
    def running(self) -> list[Row]:
        """Rows of the table that have not finished: pending rounds are theirs."""
        return [] if self._round is None else self._round.table.running

    def takes(self, row: Row) -> bool:
        """Whether rounds of this row can be recorded work."""
        is_known = self.drafter is None or self.drafter.knows(row.number, len(row.history))
        return self.may_take(row) and is_known and _why_not(row, self.target) is None

    def may_take(self, row: Row) -> bool:
        """Whether they can be now, or once the host has brought the row further."""
        if not self.whole_rounds or self.is_disabled or self._is_overheard or row.needs_host or row.bans is None:
            return False
        if self.drafter is None:
            return True
        return self.drafter.room(len(row.history) + self._pending_keys) >= MARGIN

    @property
    def _grows_trees(self) -> bool:
        return isinstance(self.drafter, DeviceTree)

    def _num_tokens(self, number: int, steps: int | None = None) -> int:
        """Tokens that a draft of this length has, or may have been given; with copies so long beside `steps` drawn."""
        if self.drafter is None:
            return number
        return self.drafter.num_tokens(number) if steps is None else max(number, self.drafter.num_tokens(steps))

    def _num_places(self, number: int) -> int:
        """Places of a row's block that such a draft takes."""
        return max(number, self.drafter.nodes) if isinstance(self.drafter, DeviceTree) else number

    @property
    def _is_overheard(self) -> bool:
        """Whether anybody but the drafter listens to the target: recorded rounds hand hidden states to no one else."""
        drafter_observer = None if self.drafter is None else self.drafter.observer
        return any(observer is not drafter_observer for observer in self.target.observers)

    def may_score(self) -> bool:
        """Whether the target's pass can be recorded work."""
        return not self.is_disabled

    def needs_new_table(self, rows: Sequence[Row], lengths: Sequence[int]) -> bool:
        """Whether the coming round needs another table than the last one had; asked once a round.

        Rows move to a smaller table only after a while: no round can be pending meanwhile, which costs what several
        rounds with fewer dummies save.
        """
        longest, entries, is_in_table = max(lengths), next_power_of_two(len(rows)), self._are_in_table(rows)
        size = self._sizes.pick((round_up_draft(longest), self._versions), entries, entries, force=not is_in_table)
        present = self._round.table.size if is_in_table and self._round is not None else 0
        self._oversized = self._oversized + 1 if size < present else 0
        self._size = present if 0 < self._oversized <= SHRINK_AFTER else size
        return not is_in_table or not self._table_fits(self._num_places(longest))

    def may_reach_forced_token(self, rows: Sequence[Row], lengths: Sequence[int]) -> bool:
        """Whether such a round might reach a position whose token a processor prescribes: recordings only ban ids.

        Rows that come so near are the host's from now on.
        """
        most = self._pending_keys + max(lengths) + 1
        near = [row for row in rows if row.bans is not None and len(row.output) + most > row.bans.until]
        for row in near:
            row.needs_host = True
        return bool(near)

    def may_follow(self, lengths: Sequence[int]) -> bool:
        """Whether the drafter will have kept up with the pending round: after one without a draft it has not."""
        return not self.pending or not any(lengths) or self.pending[-1].shape.drawn > 0

    def should_launch_another(self, rows: Sequence[Row]) -> bool:
        """Whether some row needs a round after the pending ones whatever they bring, and a read buffer is free."""
        most = sum(pending.shape.drafted + 1 for pending in self.pending)
        return len(self.pending) < READ_BUFFERS - 1 and any(row.remaining > most for row in rows)

    @property
    def seconds_left(self) -> float:
        """Until the pending round is over, by what the last two of its kind took; 0 where it is over, or not known.

        The shorter of the two: what took long once (the draft before which a prompt was read, a hiccup) is no estimate.
        """
        if len(self.pending) != 1 or self.pending[0].buffer.marks.is_over():
            return 0.0
        return self._began + min(self._took.get(self.pending[0].kind, (0.0,))) - self.clock()

    def launch(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        view: BatchView,
        is_fixed: bool = False,
        host_draft: HostDraft | None = None,
    ) -> None:
        """Start a round without waiting for anything; `host_draft` is what the host found behind all its tokens.

        Lengths that are fixed, or among those offered, are recorded at once; but near the end of all budgets every
        round has another length, and none of them is.
        """
        if self.drafter is not None:
            copied = (0,) * len(lengths) if host_draft is None else host_draft.copied
            lengths = [copy or min(length, self.drafter.most) for length, copy in zip(lengths, copied, strict=True)]
        longest = max(lengths)
        device_round = self._fill_table(rows, self._num_places(longest))
        table = device_round.table
        kind = (table.size, table.width, table.flags, self._versions)
        size = longest if is_fixed else round_up_draft(longest)
        force = longest == size and max(view.max_lengths) >= 2 * longest + NEAR
        force = force or not (longest or self.drafts)  # without a drafter nothing longer can stand in for no draft
        number = self._drafts.pick(kind, longest, size, force)
        count = bucket(self._num_tokens(number) + 1)
        table.deactivate_finished()
        steps: int | None = None
        if host_draft is not None and host_draft.has_copies:
            assert not self.pending, "a copy needs the tokens of the round before"
            table.send_copies(lengths, host_draft.copies)
            drawn = max(host_draft.drawn)
            pairs = (pair for pair in self._warm_copies if longest <= pair[0] < table.width and pair[1] >= drawn)
            number, steps = min(pairs, default=(number, min(number, drawn if is_fixed else round_up_draft(drawn))))
            count = bucket(self._num_tokens(number, steps) + 1)
        else:
            table.set_draft_lengths(lengths)
        drawn = number if steps is None else steps
        first, is_tree = self._num_first(drawn), self._grows_trees and drawn > 0
        buffer = next(self._buffers[table.size, table.width, False])
        buffer.marks.set(0)
        read = self._num_read(table) if drawn and not self.pending else None
        shape = Shape(number, count, key_bound(self._reserve(table, drawn, count, first)), first, steps, is_tree)
        recorded = self.recorder.seconds
        draft, score, verify = self._work(device_round, shape, holds_rows=True)
        # What the drafter had to take in first is part of drafting; recording is not.
        has_read = read is not None and self._num_read(table) != read and self.recorder.seconds == recorded
        for index, work in enumerate((draft, score, verify)):
            if index or not has_read:
                buffer.marks.set(index)
            work()
        buffer.fetch(table)
        idle = self._idle_seconds() if self.recorder.seconds == recorded else None
        if not self.pending:
            self._began = self.clock()
        self.pending.append(
            PendingRound(table.rows, shape, buffer, view.round_number, idle, host_draft, table.alternatives)
        )

    def collect(self) -> VerifiedRound:
        """Wait for the oldest pending round and read what became of its rows that are still running."""
        pending = self.pending.popleft()
        pending.buffer.marks.wait()
        self._began = self.clock()  # of the next one
        self._idle_since = None if self.pending else self._began
        seconds = Seconds(*pending.buffer.marks.seconds())
        self._took[pending.kind] = (*self._took.get(pending.kind, ())[-1:], seconds.decoding)
        running = [i for i, row in enumerate(pending.rows) if row.finish_reason is None]
        rows, result = [pending.rows[i] for i in running], pending.buffer.result[running]
        drafts = [numbers[HEAD : HEAD + numbers[3]] for numbers in result.tolist()]
        blocks = [[row.history[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
        verdict = Verdict(result[:, 0], result[:, 1], result[:, 2].bool())
        host_draft = None if pending.host_draft is None else pending.host_draft.of_running()
        return VerifiedRound(
            rows,
            blocks,
            _kept_of_trees(result) if pending.shape.is_tree else kept_of(verdict, blocks, None),
            verdict,
            scored=sum(map(len, blocks)),
            round_number=pending.round_number,
            seconds=seconds,
            logprobs=self._logprobs(pending, running, blocks, verdict),
            score_again=self._score_again,
            steps=pending.shape.drafted,
            drawn=pending.shape.drawn if self.drafts else 0,
            evidence=None if host_draft is None else host_draft.evidence,
            copied=None if host_draft is None else tuple(not drawn for drawn in host_draft.drawn),
            guesses=None if host_draft is None else host_draft.guesses,
            wanted=None if host_draft is None else host_draft.copied,
            idle_seconds=pending.idle_seconds,
        )

    def _logprobs(
        self, pending: PendingRound, running: Sequence[int], blocks: Sequence[Sequence[int]], verdict: Verdict
    ) -> list[list[TokenLogprob]]:
        """Of what each running row emits; nothing where nobody asks."""
        if pending.alternatives is None:
            return []
        number, numbers = pending.alternatives, pending.buffer.logprobs[pending.alternatives][running].tolist()
        kept, following = verdict.num_accepted.tolist(), verdict.next_token.tolist()
        logprobs = []
        for place, row, block, accepted, last in zip(running, numbers, blocks, kept, following, strict=True):
            wanted = pending.rows[place].request.logprobs
            tokens = () if wanted is None else (*block[1 : 1 + accepted], last)
            logprobs.append([_token_logprob(*pair, number, wanted or 0) for pair in zip(tokens, row, strict=False)])
        return logprobs

    def _score_again(self, row: Row, block: Sequence[int]) -> Tensor:
        """The target's logits [n, V] behind a row that failed, which no recording keeps; keys stay as they are."""
        keys = self.target.length(row.number)
        logits = self.target.score([row.number], [block])
        _set_length(self.target, row, keys)
        return logits

    def _idle_seconds(self) -> float | None:
        """How long the device has waited for the round that was just launched."""
        if self.pending:
            return 0.0
        return None if self._idle_since is None else self.clock() - self._idle_since

    def sync_lengths(self, done: VerifiedRound, progress: Sequence[Progress]) -> None:
        """Bring the host's lengths to the device's, once the rows have been given what they gained."""
        for row, gained in zip(done.rows, progress, strict=True):
            keys = len(row.history) - 1
            _set_length(self.target, row, keys)
            if self.drafter is not None:
                past = keys - len(gained.tokens)  # keys before the round
                self.drafter.set_length(row.number, past, keys, done.drawn)

    def wait(self) -> None:
        """Until the device has run all pending rounds; they are still to be collected."""
        if self.pending:
            self.pending[-1].buffer.marks.wait()

    def disable(self, error: Exception, what: str = "a round") -> None:
        """After a recording that failed, work is run step by step; pending rounds are still collected.

        For a while only where memory ran out, unless other ranks would have to go back to recordings as well.
        """
        self.is_disabled, consequence, is_known = True, "", False
        if is_out_of_memory(error) and self.target.counterparts is None:
            is_known = self._next_pause > PAUSE
            self._paused_for, self._next_pause = self._next_pause, 2 * self._next_pause
            consequence = ", and recording is tried again later"
        if not is_known:
            problem = f"{what} could not be recorded ({type(error).__name__}: {error})"
            remark = f"{problem}; decoding goes on without CUDA graphs, slower{consequence}"
            warnings.warn(remark, ForerunWarning, stacklevel=5)

    def note_plain_round(self) -> None:
        """A round goes step by step: enough of them end a pause."""
        if self._paused_for:
            self._paused_for -= 1
            self.is_disabled = self._paused_for > 0

    def score(self, rows: Sequence[Row], blocks: Sequence[Sequence[int]]) -> Tensor:
        """What `Scorer.score` gives for blocks behind the rows' keys, by the recorded pass: [N, V]."""
        numbers = [row.number for row in rows]
        counts, past = [len(block) for block in blocks], [self.target.length(number) for number in numbers]
        count, cache = bucket(max(counts)), self.target.cache
        count = min((known for known in self._warm_counts if known >= count), default=count)
        self._look_at_weights(numbers)
        size, width = next_power_of_two(len(rows)), table_width(count)
        device_round = self._round_of(size, width)
        if device_round is self._round and self.pending:  # whose rows stay in their table
            device_round = self._round_of(size, width, is_second=True)
        dummy = cache.reserve_slots(size > len(rows))
        cache.reserve(numbers, [start + count for start in past], _final_length(rows))
        self.target.lay_out()
        bound, slots = max(key_bound(max(past) + count), self._warm_bound), [cache.slot(number) for number in numbers]
        what = RecordedPass(size, count, bound, slots, dummy, past, list(map(list, blocks)))
        with self._on_all_ranks(device_round, what):
            self._pass_of(device_round, what)()
        for row, start, length in zip(rows, past, counts, strict=True):
            _set_length(self.target, row, start + length)
        picks = ranges([place * count for place in range(len(rows))], counts).to(self.target.device)
        for observer in self.target.observers:
            observer.on_hidden_states(numbers, past, counts, self._hidden.rows[picks])
        return self._scratch.rows[picks]

    @contextmanager
    def _on_all_ranks(self, device_round: DeviceRound, what: RecordedPass, is_run: bool = True) -> Iterator[None]:
        """While a pass is recorded, if it is new here, or run: the same on the other ranks of a split target."""
        if self.target.counterparts is None:
            yield
            return
        if self._follower is None:
            number = self.target.counterparts.make_followers(self, follower_of)
            self._follower = number, Marks(self.target.device, self.clock, 1)
        number, end = self._follower
        is_new = not self.recordings.has(self._score_key(device_round, _shape_of(what)), self._score_version())
        with self.target.counterparts.run_recorded(number, what, is_new=is_new, is_run=is_run, is_over=end.is_over):
            if is_new:
                self.recorder.on_all_ranks(lambda: device_round.make_room(_shape_of(what)))
            yield
            end.set(0)

    @torch.inference_mode()
    def repeat(self, call: RecordedCall) -> None:
        """On a rank that follows: what rank 0 does at the same time."""
        self.target.catch_up(call)
        what = call.what
        size, width = what.size, table_width(what.count)
        if call.is_new:
            self.recorder.on_all_ranks(lambda: self._round_of(size, width).make_room(_shape_of(what)))
        device_round = self._round_of(size, width)
        key = self._score_key(device_round, _shape_of(what))
        if call.is_new:
            self.recordings.forget(key)
            self._scored = []  # rank 0's weights may have moved, and these with them
        self._look_at_weights(what.slots)
        if not (call.is_new or self.recordings.has(key, self._score_version())):  # rank 0 may be waiting by now
            raise RankLost("weights have moved on this rank alone, so that a recorded pass has become useless")
        work = self._pass_of(device_round, what)
        if call.is_run:
            work()

    def _pass_of(self, device_round: DeviceRound, what: RecordedPass) -> Work:
        """The recording of a pass, and its tokens where it will read them."""
        slots = [RowSlots(slot, 0) for slot in what.slots]
        device_round.table.assign_blocks(slots, what.past, what.blocks, RowSlots(what.dummy, 0))
        return self._recorded_score(device_round, _shape_of(what))

    def _look_at_weights(self, rows: list[int]) -> None:
        """Where they lie: once for as long as the rows of passes are the same."""
        if self._scored != rows:
            self._scored, self._weights = rows, fingerprint(self._scorers)

    def covered(self, params: LawParams) -> LawParams:
        """Parameters of rows that go step by step, after a warm-up by what has been compiled for rows of every kind."""
        return covering(params) if self._warm_kinds and not params.all_greedy else params

    def release_table(self) -> None:
        """The host's numbers count again: rows have moved, or another kind of round follows."""
        assert not self.pending, "pending rounds would be lost"
        self._idle_since = None  # whatever comes before the next launch is not the device waiting for it
        if self._round is not None:
            self._round.table.rows = ()

    def discard_pending(self) -> None:
        """Forget pending rounds: no row waits for them any more."""
        self.pending.clear()
        self.release_table()

    @property
    def _scorers(self) -> list[Scorer]:
        return [self.target] if self.drafter is None else [self.target, *self.drafter.scorers]

    @property
    def _versions(self) -> Hashable:
        """Of the caches: once keys have moved, no earlier recording is of use."""
        return self.target.version, None if self.drafter is None else self.drafter.version

    @property
    def _pending_keys(self) -> int:
        """The most keys a row may have gained in pending rounds."""
        return sum(pending.shape.scored for pending in self.pending)

    def _are_in_table(self, rows: Sequence[Row]) -> bool:
        """Whether these are all running rows of the table: a row that has finished may stay in it."""
        present = self.running
        return len(present) == len(rows) and all(a is b for a, b in zip(present, rows, strict=True))

    def _table_fits(self, number: int) -> bool:
        """Whether the table has the size it should have, and is wide enough for so many drafted tokens."""
        table = None if self._round is None else self._round.table
        return table is not None and number < table.width and table.size == self._size

    def _fill_table(self, rows: Sequence[Row], number: int) -> DeviceRound:
        """The round whose table holds `rows`, written anew where they are not in it yet."""
        if self._round is not None and self._are_in_table(rows) and (self.pending or self._table_fits(number)):
            return self._round
        assert not self.pending, "rows cannot change while a round is pending"
        self.release_table()
        device_round = self._round = self._round_of(self._size, table_width(number + 1))
        caches = [self.target.cache, *(() if self.drafter is None else self.drafter.caches)]
        longest, final = max(len(row.history) for row in rows), _final_length(rows)
        dummies = [cache.reserve_slots(device_round.table.size > len(rows), longest, final) for cache in caches]
        for scorer in self._scorers:
            scorer.lay_out()
        slots = [RowSlots(caches[0].slot(row.number), caches[-1].slot(row.number)) for row in rows]
        device_round.table.assign(rows, slots, RowSlots(dummies[0], dummies[-1]))
        if self._warm_kinds and device_round.table.flags not in self._warm_kinds:
            device_round.table.cover_all(sorted(self._warm_alternatives))
        if self.drafter is not None and self.drafter.reads_recent:
            device_round.table.assign_recent()
        self._weights = fingerprint(self._scorers)
        return device_round

    def _num_first(self, number: int) -> int:
        """Tokens that the first step of a draft takes in."""
        if self.drafter is None or not number:
            return 0
        return self.drafter.num_first(number, [pending.shape.drafted for pending in self.pending])

    def _reserve(self, table: RowTable, number: int, count: int, first: int) -> int:
        """Reserve keys for the coming round in all caches, and bring the drafter to at most `first` tokens behind.

        Returns a bound on the keys of a row. A finished one may have advanced for as long as rounds were pending.
        """
        before = [
            len(row.history) - 1 + (self._pending_keys if row.finish_reason is None else 2 * table.width)
            for row in table.rows
        ]
        if self.drafter is not None and number and not self.pending:
            running = table.running
            self.drafter.read_up([row.number for row in running], [row.history for row in running], first)
        if self.drafter is not None and number:
            count = max(count, 1 + self.drafter.num_keys(number))
        if self.drafter is not None and (number or self.drafter.observer is not None):  # which hears every round
            for cache in self.drafter.caches:
                # Tokens of the first step that lie before a row's beginning go where the cache says.
                ends = [keys + count if keys >= first else max(count, cache.stray_end) for keys in before]
                _reserve_keys(cache, table.rows, ends)
        ends = [keys + count for keys in before]
        _reserve_keys(self.target.cache, table.rows, ends)
        return max(ends)

    def _num_read(self, table: RowTable) -> int:
        """Keys that the drafter has of all running rows together."""
        caches = () if self.drafter is None else self.drafter.caches
        return sum(cache.length(row.number) for cache in caches for row in table.running)

    def _work(self, device_round: DeviceRound, shape: Shape, holds_rows: bool) -> tuple[Work, Work, Work]:
        """The recordings of a round. A draft begins with tokens whose keys the drafter has had before and writes again:
        where it `holds_rows` of requests, these must be no worse for it, whatever becomes of the round."""
        table, get = device_round.table, self.recordings.get
        draft: Work = _no_draft
        if shape.drafted:
            kind: tuple[Hashable, ...] = ("draft", device_round, shape.drafted, shape.steps)
            drafted = replace(shape, key_bound=max(shape.key_bound, self._warm_bound))
            if shape.drawn:
                kind = (*kind, drafted.first, drafted.key_bound, table.law_flags)
            draft = get(
                kind,
                lambda: (self._draft_version, device_round.draft_logits.version) if shape.drawn else None,
                partial(device_round.draft, drafted),
                table.state,
                whole=holds_rows,
            )
        score = self._recorded_score(device_round, shape)
        verify = get(
            ("verify", device_round, shape.drafted, shape.scored, shape.steps, table.flags),
            lambda: (self._scratch.version, device_round.draft_logits.version, *self._versions_after_scoring),
            partial(device_round.verify, shape),
            table.state,
        )
        return draft, score, verify

    def _recorded_score(self, device_round: DeviceRound, shape: Shape) -> Work:
        return self.recordings.get(
            self._score_key(device_round, shape),
            self._score_version,
            partial(device_round.score, shape),
            device_round.table.state,
        )

    def _score_key(self, device_round: DeviceRound, shape: Shape) -> Hashable:
        depth = shape.drafted if shape.is_tree else 0
        return "score", device_round, shape.scored, shape.key_bound, depth, bool(self.target.observers)

    def _score_version(self) -> Hashable:
        return self.target.version, self._scratch.version, self._hidden.version, self._weights

    @property
    def _versions_after_scoring(self) -> tuple[Hashable, ...]:
        """Of hidden states and where they go, where the drafter hears them, and of keys that a tree's path leaves."""
        heard = None
        if self.drafter is not None and self.drafter.observer is not None:
            heard = self._hidden.version, self.drafter.version
        return heard, self.target.version if self._grows_trees else None

    @property
    def _draft_version(self) -> Hashable:
        assert self.drafter is not None
        return self.drafter.version, self._weights

    def prepare(
        self, size: int, number: int, bound: int, like: Row, *, for_all: bool = False, steps: int | None = None
    ) -> None:
        """Record a round of `size` rows like `like` with `number` drafted tokens and up to `bound` keys; none is run.

        With `for_all` it is the one that rows of every kind can use. With `steps` some rows have copies, and so many
        tokens are drawn for the others.
        """
        device_round, dummy = self._dummy_round(size, table_width(self._num_places(number) + 1))
        table = device_round.table
        table.assign([like], [dummy], dummy)
        if for_all:
            table.cover_all()
        self._weights, count = fingerprint(self._scorers), bucket(self._num_tokens(number, steps) + 1)
        drawn = number if steps is None else steps
        for first in self._firsts(drawn):
            shape = Shape(number, count, bound, first, steps, self._grows_trees and drawn > 0)
            self._work(device_round, shape, holds_rows=False)
        self._warm_kinds.add(table.flags)
        if table.alternatives is not None:
            self._warm_alternatives.add(table.alternatives)
        if steps is not None:
            self._warm_copies.add((number, steps))
        self._drafts.learn((table.size, table.width, table.flags, self._versions), number)
        table.rows = ()

    def prepare_pass(self, size: int, count: int, is_second: bool) -> None:
        """Record a pass of `count` tokens a row, for rows that go step by step; `is_second` beside rounds under way."""
        device_round, dummy = self._dummy_round(size, table_width(count), is_second)
        self._weights = fingerprint(self._scorers)
        what = RecordedPass(size, count, self._warm_bound, [dummy.slot], dummy.slot, [1], [[0]])
        with self._on_all_ranks(device_round, what, is_run=False):
            self._pass_of(device_round, what)
        self._warm_counts.add(count)

    def record_prompts(self, bound: int | None = None, *, with_head: bool = False) -> None:
        """Let passes over prompts be recorded, the target's and a draft model's.

        Those of rows with up to `bound` keys at once; without a bound each when it is first met. `with_head` the
        target's give logits as well.
        """
        drafter = self.drafter.scorers if isinstance(self.drafter, DeviceDraftModel) else ()
        self._prompt_passes = []
        for scorer in (self.target, *drafter):
            if prompt_passes.why_not(scorer) is None:
                is_target = scorer is self.target
                passes = PromptPasses(scorer, self.recorder, bound, with_head=with_head and is_target)
                if bound is not None:
                    passes.prepare()
                self._prompt_passes.append(passes)
                scorer.recorded_feed = passes.feed

    def _dummy_round(self, size: int, width: int, is_second: bool = False) -> tuple[DeviceRound, RowSlots]:
        """A round to record, and where its dummy rows write."""
        self.release_table()
        device_round = self._round_of(size, width, is_second)
        caches = [self.target.cache, *(() if self.drafter is None else self.drafter.caches)]
        dummies = [cache.reserve_slots(True) for cache in caches]
        for scorer in self._scorers:
            scorer.lay_out()
        return device_round, RowSlots(dummies[0], dummies[-1])

    def expect(self, bound: int, lengths: Sequence[int]) -> None:
        """Let all drafts and passes be recorded for `bound` keys: one that is too large costs them little.

        `lengths` are those of the rounds that may be pending when a draft begins.
        """
        self._warm_bound, self._lengths_before = bound, tuple(lengths)

    def _firsts(self, number: int) -> set[int]:
        """What the first step of a draft may have to take in, behind every round that may be pending."""
        if self.drafter is None or not number:
            return {0}
        before = [[], *([length] for length in self._lengths_before)]
        return {self.drafter.num_first(number, pending) for pending in before}

    def _round_of(self, size: int, positions: int, is_second: bool = False) -> DeviceRound:
        """The round of a table of this size; with `is_second` another one, for passes alone."""
        if (key := (size, positions, is_second)) not in self._rounds:
            table = RowTable(size, positions, self.target.vocab_size, self.target.device)
            # Buffers first: a Ctrl-C in between must not leave a round without them.
            self._buffers[key] = cycle([_read_buffer(table, self.clock) for _ in range(READ_BUFFERS)])
            self._rounds[key] = _kind_of(self.drafter)(
                table, self._pass, self.drafter, self.rule, self._scratch, self._draft_scratches, self._hidden
            )
        return self._rounds[key]


def follower_of(target: Scorer) -> Runner:
    """On a rank that follows: what repeats the passes that rank 0 has recorded, unless it cannot here."""
    if reason := why_not_passes(target):
        raise UnsupportedModel(reason)
    return Runner(target, None, Rule.TOKEN, time.perf_counter, whole_rounds=False)


def why_not_passes(target: Scorer) -> str | None:
    """What keeps a target's passes from being recorded on a GPU, in words; None where nothing does."""
    if is_sharded(target.model):
        if not isinstance(target.body, ShardBody):
            return "the target is split over processes, and run by transformers' modules"
        if reason := why_not_captured(target.model):
            return reason
    return static_pass.why_not(target)


def _kind_of(drafter: DeviceDrafter | None) -> type[DeviceRound]:
    if isinstance(drafter, DeviceTree):
        return TreeRound
    return NgramRound if isinstance(drafter, DeviceNgrams) else DeviceRound


def _shape_of(what: RecordedPass) -> Shape:
    return Shape(0, what.count, what.bound)


def _kept_of_trees(result: Tensor) -> list[Kept]:
    """The device has moved what was kept to the front, and noted the depth of each tree."""
    numbers = result[:, [0, -2, -1]].tolist()
    return [Kept(tuple(range(count)), depth, bool(whole)) for count, depth, whole in numbers]


def _read_buffer(table: RowTable, clock: Callable[[], float]) -> ReadBuffer:
    return ReadBuffer(_on_host(table.result), Marks(table.device, clock, 4))


def _on_host(source: Tensor) -> Tensor:
    return torch.zeros(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


def _token_logprob(token: int, numbers: Sequence[float], looked_up: int, wanted: int) -> TokenLogprob:
    """From the numbers of one position, see `RowTable.logprobs`."""
    wanted = min(wanted, looked_up)  # there may be fewer ids than were asked for
    ids, chances = numbers[1 : 1 + wanted], numbers[1 + looked_up : 1 + looked_up + wanted]
    return TokenLogprob(token, numbers[0], tuple(zip(map(int, ids), chances, strict=True)))


def _why_not(row: Row, target: Scorer) -> str | None:
    """What a row asks for that a recorded round does not give; None where it asks for nothing of the kind."""
    if target.length(row.number) != len(row.history) - 1:
        return "a prompt that comes along"
    return row_options.why_not(row)


def _final_length(rows: Sequence[Row]) -> int:
    """The most keys any of the rows can end with, those included that pending rounds may write past its end."""
    return max(len(row.request.prompt) + row.stop.budget for row in rows) + PENDING_KEYS


def _reserve_keys(cache: KeyValueCache, rows: Sequence[Row], ends: Sequence[int]) -> None:
    """Memory for keys below `ends`. What a finished row writes past its blocks goes to a block that is nobody's."""
    needed = {
        row.number: end
        for row, end in zip(rows, ends, strict=True)
        if cache.reads_in_place or row.finish_reason is None
    }
    cache.reserve(list(needed), list(needed.values()), _final_length(rows))


def _set_length(scorer: Scorer, row: Row, length: int) -> None:
    scorer.cache.set_length(row.number, length)


def _no_draft() -> None:
    """A round without a draft."""
