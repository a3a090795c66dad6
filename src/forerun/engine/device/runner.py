"""Which rounds the device can run by itself, and how they are sent off and read.

While nothing is in the air, the host's lengths are the truth: a row has `len(history) - 1` keys in the target's cache,
and the seats are written from that. A flight advances the seats on the device; landing it brings the host to the same
numbers. So a round of any other kind may come between two flights, but never between take-off and landing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from forerun.cache.ragged import ranges
from forerun.drafters import DraftModel
from forerun.engine.device.capture import Work
from forerun.engine.device.habits import Habits
from forerun.engine.device.recorder import Marks, Recorder, Recordings
from forerun.engine.device.room import bucket, fingerprint, keep_room, power, roomy, span, wanted, width
from forerun.engine.device.round import Round, Shape
from forerun.engine.device.scratch import Scratch
from forerun.engine.device.seats import Seat, Seats
from forerun.engine.row import Row
from forerun.math.advance import HEAD
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass
from forerun.types import BatchView, Rule, Verdict

LANES = 3  # one to be read, two in the air
SETTLED = 16  # rounds that rows sit among more empty places than need be before they move
NEAR = 8  # tokens left, beside two drafts, below which lengths are the budget's rather than the policy's
MARGIN = 64  # tokens before the end of a draft model's context, from where on rounds are run step by step


@dataclass(frozen=True, slots=True)
class Lane:
    """Where one round in the air will be read."""

    result: Tensor  # [R, HEAD + W - 1] int64 on the host
    logprobs: Tensor  # [R, W] float64 on the host, where a row wants them
    marks: Marks  # before drafting, after drafting, scoring, judging


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that is under way."""

    rows: tuple[Row, ...]
    shape: Shape
    lane: Lane
    turn: int  # of the view its lengths were asked with


@dataclass(frozen=True, slots=True)
class Landing:
    """What became of a round, for the rows that are still running."""

    rows: list[Row]
    blocks: list[list[int]]  # each row's last token and its draft
    past: list[int]  # keys each row had before
    verdict: Verdict  # on the host
    logprobs: list[list[float]]  # of what each row emits, where it wants to know
    drafted: int  # K
    turn: int
    seconds: list[float]  # drafting, scoring, verifying


class Runner:
    """Rounds of recorded work behind one target and at most one draft model."""

    def __init__(
        self,
        target: Scorer,
        drafter: DraftModel | None,
        rule: Rule,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
        *,
        may_fly: bool = True,
    ) -> None:
        self.target, self.drafter, self.rule, self.clock = target, drafter, rule, clock
        self.recorder = recorder or Recorder(target.device)
        self.recordings = Recordings(self.recorder)
        self.flights: deque[Flight] = deque()
        self.is_grounded = False  # a recording has failed: nothing is sent off any more
        self.may_fly = may_fly  # whether whole rounds can be recorded, not the target's pass alone
        self._scratch, self._draft_scratch, self._hidden = Scratch(), Scratch(), Scratch()
        self._pass = StaticPass(target)
        self._rounds: dict[tuple[int, int], Round] = {}
        self._lanes: dict[tuple[int, int], cycle[Lane]] = {}
        self._round: Round | None = None  # whose seats are taken
        self._weights = 0
        self._scored: list[int] = []  # rows of the last pass alone
        self._drafts, self._sizes = Habits(patience=64), Habits(patience=512)
        self._size = 0  # places that the coming rounds should have
        self._spared = 0  # rounds that fewer places would have done for

    @property
    def is_flying(self) -> bool:
        return bool(self.flights)

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether a round of these rows can be recorded work."""
        if not self.may_fly or self.is_grounded or self.target.observers:
            return False
        if self.drafter is not None:
            longest = max(len(row.history) for row in rows) + self._airborne
            if self.drafter.room(self.target.vocab_size, longest) < MARGIN:
                return False
        if self._are_seated(rows):
            return True
        return all(_odd(row, self.target) is None for row in rows) and len(set(map(_forbidden, rows))) == 1

    def may_score(self) -> bool:
        """Whether the target's pass can be recorded work."""
        return not self.is_grounded and (self._pass.has_hidden or not self.target.observers)

    def moves(self, rows: Sequence[Row], lengths: Sequence[int]) -> bool:
        """Whether the coming round, for whose size this is asked once, needs other seats than the last one had.

        Rows that stay where they are move to fewer places only once they have sat among empty ones for a while: nothing
        can be in the air meanwhile, which costs what several rounds of fewer places save.
        """
        longest, places, is_seated = max(lengths), power(len(rows)), self._are_seated(rows)
        size = self._sizes.choose((roomy(longest), self._places), places, places, meant=not is_seated)
        taken = self._round.seats.size if is_seated and self._round is not None else 0
        self._spared = self._spared + 1 if size < taken else 0
        self._size = taken if 0 < self._spared <= SETTLED else size
        return not is_seated or not self._seats_fit(longest)

    def may_reach_an_end(self, rows: Sequence[Row], lengths: Sequence[int]) -> bool:
        """Whether such a round might come to where a row is told what to say, which no recording knows."""
        most = self._airborne + max(lengths) + 1
        return any(row.bans is not None and len(row.output) + most > row.bans.until for row in rows)

    def may_follow(self, lengths: Sequence[int]) -> bool:
        """Whether the drafter will have kept up with a round in the air: after one without a draft it has not."""
        return not self.flights or not any(lengths) or self.flights[-1].shape.drafted > 0

    def is_needed(self, rows: Sequence[Row]) -> bool:
        """Whether some row will want a round behind those in the air whatever becomes of them, and there is a lane."""
        most = sum(flight.shape.drafted + 1 for flight in self.flights)
        return len(self.flights) < LANES - 1 and any(row.remaining > most for row in rows)

    def launch(self, rows: Sequence[Row], lengths: Sequence[int], view: BatchView, is_fixed: bool = False) -> None:
        """Send a round off: nothing is waited for.

        Lengths that are fixed, or among those offered, are recorded at once; but near the end of all budgets every
        round has another length, and none of them is.
        """
        longest = max(lengths)
        turn = self._take_seats(rows, longest)
        seats = turn.seats
        kind = (seats.size, seats.width, seats.flags, self._places)
        size = longest if is_fixed else roomy(longest)
        meant = longest == size and max(view.max_lengths) >= 2 * longest + NEAR
        number = self._drafts.choose(kind, longest, size, meant)
        count = bucket(number + 1)
        seats.excuse()
        seats.ask(lengths)
        shape = Shape(number, count, span(self._make_room(seats, number, count)))
        draft, score, judge = self._work(turn, shape)
        lane = next(self._lanes[seats.size, seats.width])
        for index, work in enumerate((draft, score, judge)):
            lane.marks.set(index)
            work()
        lane.result.copy_(seats.standing.result, non_blocking=True)
        if seats.wants_logprobs:
            lane.logprobs.copy_(seats.logprobs, non_blocking=True)
        lane.marks.set(3)
        self.flights.append(Flight(seats.rows, shape, lane, view.turn))

    def land(self) -> Landing:
        """Wait for the oldest round in the air and read it."""
        flight = self.flights.popleft()
        flight.lane.marks.wait()
        running = [i for i, row in enumerate(flight.rows) if row.finish_reason is None]
        rows, result = [flight.rows[i] for i in running], flight.lane.result[running]
        pairs = list(zip(rows, result.tolist(), strict=True))
        return Landing(
            rows,
            [[row.history[-1], *own[HEAD : HEAD + own[3]]] for row, own in pairs],
            [len(row.history) - 1 for row in rows],
            Verdict(result[:, 0], result[:, 1], result[:, 2].bool()),
            flight.lane.logprobs[running].tolist() if any(row.request.logprobs is not None for row in rows) else [],
            flight.shape.drafted,
            flight.turn,
            flight.lane.marks.seconds(),
        )

    def settle(self, landing: Landing) -> None:
        """Bring the host's lengths to the device's, once the rows have been given what they gained."""
        for row, past in zip(landing.rows, landing.past, strict=True):
            keys = len(row.history) - 1
            _set_length(self.target, row, keys)
            if self.drafter is not None:
                known = past + landing.drafted if landing.drafted else self.drafter.scorer.length(row.number)
                _set_length(self.drafter.scorer, row, min(known, keys))

    def score(self, rows: Sequence[Row], blocks: Sequence[Sequence[int]]) -> Tensor:
        """What `Scorer.score` gives for blocks that follow the rows' own keys, by the recorded pass: [N, V]."""
        numbers = [row.number for row in rows]
        counts, past = [len(block) for block in blocks], [self.target.length(number) for number in numbers]
        count, cache = bucket(max(counts)), self.target.cache
        if self._scored != numbers:
            self._scored, self._weights = numbers, fingerprint(self._scorers)
        turn = self._round_of(power(len(rows)), width(count))
        seats = turn.seats
        cache.reserve(len(cache.rows) + (seats.size > len(rows)), cache.capacity)
        keep_room(cache, rows, [start + count for start in past], _final(rows))
        self.target.lay_out()
        places = [Seat(cache.slot(row.number), 0) for row in rows]
        seats.place(places, past, blocks, Seat(cache.num_slots - 1, 0))
        self._recorded_score(turn, Shape(0, count, span(max(past) + count)))()
        for row, start, own in zip(rows, past, counts, strict=True):
            cache.set_length(row.number, start + own, start + own)
        picks = ranges([place * count for place in range(len(rows))], counts).to(self.target.device)
        for observer in self.target.observers:
            observer.on_hidden_states(numbers, past, counts, self._hidden.rows[picks])
        return self._scratch.rows[picks]

    def leave(self) -> None:
        """The host's numbers count again: rows have moved, or another kind of round follows."""
        assert not self.flights, "rounds in the air would be lost"
        if self._round is not None:
            self._round.seats.rows = ()

    def drop(self) -> None:
        """Forget what is in the air: nobody waits for it any more."""
        self.flights.clear()
        self.leave()

    @property
    def _scorers(self) -> list[Scorer]:
        return [self.target] if self.drafter is None else [self.target, self.drafter.scorer]

    @property
    def _places(self) -> Hashable:
        """Where keys are: once they have moved, no recording of before is of use."""
        return tuple(scorer.version for scorer in self._scorers)

    @property
    def _airborne(self) -> int:
        """The most keys a row may have gained that the host does not know of."""
        return sum(flight.shape.scored for flight in self.flights)

    def _are_seated(self, rows: Sequence[Row]) -> bool:
        """Whether these are all that still run of those seated: a row that has finished need not leave at once."""
        seated = [] if self._round is None else self._round.seats.running
        return len(seated) == len(rows) and all(a is b for a, b in zip(seated, rows, strict=True))

    def _seats_fit(self, number: int) -> bool:
        """Whether there are as many places as there should be, and wide enough for so many drafted tokens."""
        seats = None if self._round is None else self._round.seats
        return seats is not None and number < seats.width and seats.size == self._size

    def _take_seats(self, rows: Sequence[Row], number: int) -> Round:
        if self._round is not None and self._are_seated(rows) and (self.flights or self._seats_fit(number)):
            return self._round
        assert not self.flights, "rows cannot change while a round is in the air"
        self.leave()
        turn = self._round = self._round_of(self._size, width(number + 1))
        caches = [scorer.cache for scorer in self._scorers]
        keys = wanted(max(len(row.history) for row in rows), _final(rows))
        for cache in caches:
            cache.reserve(len(cache.rows) + (turn.seats.size > len(rows)), max(keys, cache.capacity))
        for scorer in self._scorers:
            scorer.lay_out()
        seats = [Seat(caches[0].slot(row.number), caches[-1].slot(row.number)) for row in rows]
        turn.seats.take(rows, seats, Seat(caches[0].num_slots - 1, caches[-1].num_slots - 1))
        self._weights = fingerprint(self._scorers)
        return turn

    def _make_room(self, seats: Seats, number: int, count: int) -> int:
        """Keys for the coming round in both caches, and the drafter no more than two tokens behind.

        Returns a bound on the keys of a row. One that finished may have gone on for as long as rounds were in the air.
        """
        before = [
            len(row.history) - 1 + (self._airborne if row.finish_reason is None else 2 * seats.width)
            for row in seats.rows
        ]
        final = _final(seats.rows)
        if self.drafter is not None and number:
            if not self.flights:
                running = seats.running
                self.drafter.read_up([row.number for row in running], [row.history for row in running])
            cache = self.drafter.scorer.cache
            # A row of one token begins its draft with one that does not exist, which goes to the cache's last place.
            ends = [keys + number if keys else max(number, cache.capacity) for keys in before]
            keep_room(cache, seats.rows, ends, final)
        ends = [keys + count for keys in before]
        keep_room(self.target.cache, seats.rows, ends, final)
        return max(ends)

    def _work(self, turn: Round, shape: Shape) -> tuple[Work, Work, Work]:
        seats, get = turn.seats, self.recordings.get
        draft: Work = _nothing
        if shape.drafted:
            draft = get(
                ("draft", seats.size, seats.width, shape.drafted, shape.span, seats.flags),
                lambda: (self._draft_version, self._draft_scratch.version),
                partial(turn.draft, shape),
                seats.state,
            )
        score = self._recorded_score(turn, shape)
        judge = get(
            ("judge", seats.size, seats.width, shape.drafted, shape.scored, seats.flags),
            lambda: (self._scratch.version, self._draft_scratch.version),
            partial(turn.judge, shape),
            seats.state,
        )
        return draft, score, judge

    def _recorded_score(self, turn: Round, shape: Shape) -> Work:
        return self.recordings.get(
            ("score", turn.seats.size, turn.seats.width, shape.scored, shape.span, bool(self.target.observers)),
            lambda: (self.target.version, self._scratch.version, self._hidden.version, self._weights),
            partial(turn.score, shape),
            turn.seats.state,
        )

    @property
    def _draft_version(self) -> tuple[tuple[int, ...], int]:
        assert self.drafter is not None
        return self.drafter.scorer.version, self._weights

    def _round_of(self, size: int, positions: int) -> Round:
        if (size, positions) not in self._rounds:
            device, drafter = self.target.device, self.drafter
            draft = None if drafter is None else StaticPass(drafter.scorer)
            ids = None if drafter is None else drafter.ids
            seats = Seats(size, positions, device)
            self._rounds[size, positions] = Round(
                seats, self._pass, draft, self.rule, ids, self._scratch, self._draft_scratch, self._hidden
            )
            self._lanes[size, positions] = cycle([_lane(seats, self.clock) for _ in range(LANES)])
        return self._rounds[size, positions]


def _lane(seats: Seats, clock: Callable[[], float]) -> Lane:
    device = seats.table.device
    sources = seats.standing.result, seats.logprobs
    here = [torch.zeros(s.shape, dtype=s.dtype, pin_memory=device.type == "cuda") for s in sources]
    return Lane(here[0], here[1], Marks(device, clock, 4))


def _odd(row: Row, target: Scorer) -> str | None:
    """What a row wants that a recorded round does not give."""
    if row.adjuster is not None and (row.bans is None or len(row.output) < row.bans.since):
        return "penalties, biases or processors"
    if row.request.logprobs is not None and any(_forbidden(row)):
        return "log-probabilities of what it may not say"
    if row.request.logprobs:
        return "log-probabilities of alternatives"
    if target.length(row.number) != len(row.history) - 1:
        return "a prompt that comes along"
    return None


def _forbidden(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that are never said, and ids that are not said first."""
    return ((), ()) if row.bans is None else row.bans.ids


def _final(rows: Sequence[Row]) -> int:
    """Tokens of the longest row in the end."""
    return max(len(row.request.prompt) + row.stop.budget for row in rows)


def _set_length(scorer: Scorer, row: Row, length: int) -> None:
    scorer.cache.set_length(row.number, length, length)


def _nothing() -> None:
    """A round without a draft."""
