"""The default policy: draft as long as it pays on this machine with this drafter, and not at all when it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.arguments import integer, number
from forerun.policy.acceptance import Acceptance
from forerun.policy.base import Policy
from forerun.policy.cost import ALONG, DraftCost, ReadCost, Samples, ScoreCost
from forerun.policy.heuristics import OwnAcceptance
from forerun.policy.plan import MARGIN, RoundPrices, best_copies, best_lengths, best_size
from forerun.policy.rest import Rest
from forerun.policy.starts import CopyStarts
from forerun.policy.trust import Trial, Trust
from forerun.policy.worth import Worth
from forerun.types import BatchView, Draft, RoundOutcome

TRIAL_LENGTH = 4
TRIAL_HOPE = 0.8  # the acceptance a trial is sized for
FIRST_LOSS = 1.1  # plain rounds that scoring a second position is assumed to cost before it was measured
CHEAP = 0.01  # of a plain round: drafts that cost no more are always looked at
ASKING = -1  # trials of asking at all, told apart from those of an evidence class
# Copies of earlier text come in bursts that are over when they are known: a bet on one must promise more than a draft
# model's steady acceptance has to.
COPY_MARGIN = 1.04
# With both kinds of drafts in a batch some rows run ahead of others, and rows of one call end together: what drafts
# promise on average is more than the batch gets. Per row beyond the first, where it is not known which row ends when;
# drafters of one kind are even enough.
STRAGGLERS = 0.006
LONG_ODDS = 0.05  # that a drafter pays which did not before: so much of what it then saves may go into reading
FIRST_READING = 12.0  # plain rounds that the first draft of all may read for; of several rows so much less
READ_MARGIN = 2.0  # times what reading costs, that drafts must promise to save: it is spent at once, and they may not
FEW_TRIALS = 16.0  # tokens tried: until then, reading must promise twice as much and more
HORIZON = 128  # tokens after which a text may have ended: within them drafts must pay for what was read for them
# What a plain round takes is measured again after so many rounds with drafts, because texts grow and others come. Where
# drafts decode so many times as fast, what about as many rows have taken is near enough.
STALE, SURE = 96, 2.0
IN_VAIN = 32  # plain rounds of a number of rows that could not be timed, after which others' prices have to do
PACE_MEMORY = 32.0
ASK_MEMORY = 32.0
UNSEEN = 255  # an evidence class nothing was seen of
SPOKEN_MEMORY = 16.0


@dataclass(slots=True)
class PendingQuestion:
    """What was asked for a round whose outcome is not known yet."""

    lengths: dict[int, int] = field(default_factory=dict)  # by row
    unread: dict[int, int] = field(default_factory=dict)  # by row
    trial: Trial | None = None
    worth: Worth = field(default_factory=Worth)  # of tokens that the round gains
    proposed: int = 0  # longest draft shown to `trim`
    is_rest: bool = False  # nobody was asked
    is_known: bool = False  # what a plain round takes was known, so that drafts could be compared with it
    is_first: bool = False  # nothing had been drafted before


class CostModel(Policy):
    """Lengths that maximise expected tokens per second, from measured costs and followed acceptance.

    Each number of rows starts with plain rounds; the first then has a draft of one token. Where no length pays it
    decodes plainly and spends at most the share `exploration` of the time on trying again. Decisions depend on past
    rounds and on evidence alone, so the law of the text is untouched. What was learnt outlives requests. Once it knows
    what drafts cost it may be asked a round ahead (`runs_ahead`): it then answers from the rounds it has heard of.
    """

    def __init__(self, max_length: int = 16, exploration: float = 0.01) -> None:
        remedy = "must be >= 1; Constant(0) decodes without drafting"
        self.max_length = max_length = integer("max_length", max_length, 1, remedy=remedy)
        exploration = number("exploration", exploration, lambda x: 0 <= x < 1, "must be a share of the time in [0, 1)")
        self._acceptance = Acceptance(max_length)
        self._score = ScoreCost()
        self._draft = DraftCost()
        self._reading = ReadCost()
        self._catching_up = Samples()  # of recorded rounds: what the first draft after a pause takes longer
        self._trust = Trust(exploration)
        self._asking = AskingValue()
        self._spoken = 1.0  # how often a row that was asked had a draft
        self._trims = False  # whether drafts come to `trim`, so that asking and verifying are two decisions
        self._question = PendingQuestion()  # the last one
        self._questions: dict[int, PendingQuestion] = {}  # by round number: of rounds that are under way
        self._drafting: frozenset[int] = frozenset()  # requests asked in the round before
        self._mixed = False  # whether the drafter both copies and draws
        self._drawn = UNSEEN  # the evidence class of drawn drafts, where a drafter also copies
        self._starts = CopyStarts()
        self._rest = Rest()
        self._in_vain: dict[int, int] = {}  # by rows: rounds that were to be timed, and prompts came along
        self._pace = 1.0  # tokens that rows gain in the time of a plain round, over rounds with drafts
        self._rows = 1  # of the last round

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """Not while it is finding out: what a trial taught is heard before the next round is decided on.

        Copies are found behind text that is known, so a round that is sent off early has none: that is for text in
        which they begin so seldom that waiting for them costs more.
        """
        if self._question.trial is not None or not self._score.knows_plain():
            return False
        if not self._score.knows_drafts():  # a drafter that finds nothing leaves it at that
            return not any(self._question.lengths.values())
        return not self._waits_for_copies

    @property
    def _waits_for_copies(self) -> bool:
        """Whether every round hears the one before it, because a copy may follow."""
        finds_copies = self._trims or self._mixed
        return finds_copies and self._starts.are_worth_waiting_for(self._score.plain(self._rows))

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        self._mixed = view.is_mixed
        self._question = self._questions[view.round_number] = PendingQuestion(
            unread=dict(zip(view.rows, view.unread, strict=False))
        )
        self._question.is_known, self._question.is_first = self._score.knows_plain(), not self._draft.is_known
        self._question.worth = self._worth(view)
        resting = not view.sizes and self._rest.holds(view.request_ids)
        self._question.is_rest = resting or self._has_to_time_plain(len(view.rows))
        if self._question.is_rest:
            self._question.lengths = dict.fromkeys(view.rows, 0)
            return (0,) * len(view.rows)
        chosen = self._wanted(view, tuple(min(room, self.max_length) for room in view.max_lengths))
        self._question.lengths = dict(zip(view.rows, chosen, strict=True))
        return chosen

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        self._trims = not view.is_mixed
        proposed = draft.lengths.tolist()
        if draft.cuttable is not None:
            return self._choose_copies(view, draft, proposed, draft.cuttable)
        self._question.proposed = max(proposed, default=0)
        limits = zip(proposed, view.max_lengths, strict=True)
        room = tuple(min(length, most, self.max_length) for length, most in limits)
        if not any(room):
            return room
        if not self._score.knows_drafts():
            return tuple(min(1, most) for most in room)
        evidence = draft.evidence or (0,) * len(room)
        free = [0.0] * (self.max_length + 1)  # the draft is there and paid for
        return self._choose(view, room, evidence, free, spoken=1.0, copies=True)

    def _choose_copies(
        self, view: BatchView, draft: Draft, proposed: Sequence[int], cuttable: Sequence[bool]
    ) -> tuple[int, ...]:
        """How much of each copy to verify, 0 where the row is better off with a drawn draft of the length asked for."""
        rows = len(proposed)
        room = [min(length, self.max_length) if cut else 0 for length, cut in zip(proposed, cuttable, strict=True)]
        drawn = [self._question.lengths.get(row, 0) for row in view.rows]
        evidence = draft.evidence or (0,) * rows
        copies = self._survival(view, evidence, room)
        others = list(map(sum, self._survival(view, (self._drawn,) * rows, drawn)))
        score = self._score.table(rows, rows * max(*room, *drawn))
        if len(score) <= rows:  # beyond what has been measured: one step further at a time
            return tuple(min(1, most) for most in room)
        prices = RoundPrices(score, self._draft.table(_number(drawn) or rows, self.max_length), view.sizes)
        return best_copies(copies, drawn, others, prices, self._margin(view, True), self._question.worth)

    def _survival(self, view: BatchView, evidence: Sequence[int], room: Sequence[int]) -> list[list[float]]:
        """Chances that tokens 1, 2, ... of each row's draft are all kept."""
        rows = zip(view.request_ids, evidence, room, strict=True)
        return [self._acceptance.survival(request, kind, most) for request, kind, most in rows]

    def _has_to_time_plain(self, rows: int) -> bool:
        """Whether a round without drafts comes first, so that there is something to compare drafts with."""
        is_sure = self._pace >= SURE
        if self._score.knows_plain_of(rows, SURE if is_sure else 1.0):
            return not is_sure and self._score.since_plain(rows) >= STALE
        self._in_vain[rows] = tries = self._in_vain.get(rows, 0) + 1
        return tries <= IN_VAIN or not self._score.knows_plain()

    def _worth(self, view: BatchView) -> Worth:
        rows = len(view.rows)
        if rows < 2 or not view.tokens_left or not self._score.knows_plain():
            return Worth()
        return Worth(view.tokens_left, self._score.fixed(rows) / self._score.plain(rows))

    def _margin(self, view: BatchView, copies: bool) -> float:
        """By how much drafting must beat plain decoding."""
        stragglers = 0.0 if view.tokens_left else STRAGGLERS * (len(view.rows) - 1) * self._mixed
        return (COPY_MARGIN if copies else MARGIN) + stragglers

    def copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        """Room for copies beside drawn drafts: they are free, and `trim` cuts them once they are there."""
        if self._question.is_rest or not self._score.knows_plain():
            return (0,) * len(view.rows)
        return tuple(min(room, self.max_length) for room in view.max_lengths)

    def observe(self, outcome: RoundOutcome) -> None:
        rows = len(outcome.rows)
        if not rows:
            return
        self._rows = rows
        self._starts.observe(outcome)
        question = self._questions.pop(outcome.round_number, PendingQuestion())
        # Rounds of these rows asked for before this one and not heard of never ran.
        self._questions = {
            number: other
            for number, other in self._questions.items()
            if number > outcome.round_number or other.lengths.keys().isdisjoint(outcome.rows)
        }
        asked = frozenset(
            request for row, request in zip(outcome.rows, outcome.request_ids, strict=True) if question.lengths.get(row)
        )
        self._learn_costs(outcome, asked, question)
        self._learn_acceptance(outcome)
        if self._score.knows_plain():
            self._record_outcome(outcome, asked, question)
        # Rows that had no part in this round are drafted for as they were.
        others = self._drafting.difference(outcome.request_ids)
        self._drafting = others | (self._drew(outcome) if self._mixed else asked)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        for request in request_ids:
            self._acceptance.forget(request)
        self._drafting = self._drafting.difference(request_ids)

    def describe(self) -> dict[str, object]:
        """What the policy believes, in seconds, chances and plain rounds."""
        known = self._score.rows_known()
        return {
            "score_seconds": {rows: [(round(x * rows), s) for x, s in self._score.points(rows)] for rows in known},
            "draft_seconds": {rows: self._draft.table(rows, self.max_length) for rows in known},
            "acceptance": self._acceptance.describe(),
            "spoken": self._spoken,
            "drafts_are_trimmed": self._trims,
            "copies_begin": self._starts.rate,
            "credit": self._trust.credit,
            "allowance": self._trust.allowance,
        }

    def _wanted(self, view: BatchView, room: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths to ask the drafter for."""
        none = (0,) * len(room)
        if not any(room) or not self._score.knows_plain():
            return none
        if not self._score.knows_drafts():
            return self._first_trial(view, room)
        if self._trims:
            return room if self._worth_asking(len(room)) else none
        costs = self._draft.table(len(room), self.max_length)
        kinds = (self._drawn,) * len(room) if view.is_mixed else none
        return self._choose(view, room, kinds, costs, self._spoken, copies=False)

    def _first_trial(self, view: BatchView, room: Sequence[int]) -> tuple[int, ...]:
        """A recording takes as long as many rounds, so none is made for one token alone."""
        first = [min(TRIAL_LENGTH if view.sizes else 1, most) for most in room]
        reading = self._reading_seconds(view)
        if any(reading):
            first = _one_of(first, reading)
        loss = FIRST_LOSS + READ_MARGIN * self._trial_reading(reading, first) / self._score.plain(len(room))
        return tuple(first) if self._begin_trial(loss, 0) else (0,) * len(room)

    def _reading_seconds(self, view: BatchView) -> list[float]:
        """What each row's unread text costs a drafter that is asked for it now."""
        if not view.unread:
            return [0.0] * len(view.rows)
        alone = self._score.plain_alone(len(view.rows))
        return [self._reading.seconds(unread, alone) for unread in view.unread]

    def _worth_asking(self, rows: int) -> bool:
        cost = self._asking.seconds / self._score.plain(rows)
        if cost <= CHEAP or self._asking.gain > cost:
            return True
        if not self._begin_trial(cost, ASKING):
            return False
        self._asking.soften()
        return True

    def _choose(
        self,
        view: BatchView,
        room: Sequence[int],
        evidence: Sequence[int],
        draft: Sequence[float],
        spoken: float,
        copies: bool,
    ) -> tuple[int, ...]:
        """The lengths that pay; where none does, those of a trial if one may be paid, else none."""
        survival = self._survival(view, evidence, room)
        score = self._score.table(len(room), sum(room))
        margin = self._margin(view, copies)
        if view.sizes:
            lengths = best_size(survival, score, draft, view.sizes, margin)
        else:
            lengths = best_lengths(survival, score, draft, spoken, margin, self._question.worth)
        reading = [0.0] * len(room) if copies else self._reading_seconds(view)
        spent = self._reading_margin(evidence) * _of_drafted(reading, lengths)
        if spent and spent > self._saved(lengths, survival, score, draft, min(max(view.max_lengths), HORIZON)):
            known = [[] if seconds else chances for seconds, chances in zip(reading, survival, strict=True)]
            lengths = best_lengths(known, score, draft, spoken, margin, self._question.worth)
        return lengths if any(lengths) else self._try(view, room, evidence, score, draft, reading)

    def _reading_margin(self, evidence: Sequence[int]) -> float:
        """Few drafts that were kept by luck do not pay for reading several rows."""
        if len(evidence) == 1:
            return READ_MARGIN
        return READ_MARGIN * (1 + FEW_TRIALS / (1 + self._acceptance.trials(evidence[0])))

    def _saved(
        self,
        lengths: Sequence[int],
        survival: Sequence[Sequence[float]],
        score: Sequence[float],
        draft: Sequence[float],
        tokens: int,
    ) -> float:
        """Seconds that such drafts save while each row gains `tokens`."""
        kept = self._question.worth.expected([sum(row[:length]) for row, length in zip(survival, lengths, strict=True)])
        taken = score[min(sum(lengths), len(score) - 1)] + draft[max(lengths)]
        return tokens * (score[0] - taken / (1 + kept / len(lengths)))

    def _try(
        self,
        view: BatchView,
        room: Sequence[int],
        evidence: Sequence[int],
        score: Sequence[float],
        draft: Sequence[float],
        reading: Sequence[float],
    ) -> tuple[int, ...]:
        """Lengths that would pay if the most hopeful rows did well; where there is much to be read, of one of them."""
        rates = [self._acceptance.rate(kind) if most else 0.0 for kind, most in zip(evidence, room, strict=True)]
        bar = 0.9 * max(rates)
        hopeful = [min(most, TRIAL_LENGTH) if rate >= bar else 0 for rate, most in zip(rates, room, strict=True)]
        if any(reading):
            hopeful = _one_of(hopeful, reading)
        hopes = [[TRIAL_HOPE ** (i + 1) for i in range(most)] for most in hopeful]
        lengths = best_lengths(hopes, score, draft)
        if not any(lengths):
            lengths = tuple(min(1, most) for most in hopeful)
        run = len(room) * max(lengths) if view.sizes else sum(lengths)
        hoped_for = LONG_ODDS * self._saved(lengths, hopes, score, draft, min(max(view.max_lengths), HORIZON))
        unpaid = max(self._trial_reading(reading, lengths) - max(hoped_for, 0.0), 0.0)
        spent = draft[max(lengths)] + unpaid * (self._reading_margin(evidence) if len(room) > 1 else 1.0)
        if view.sizes:
            if not self._waits_for_copies:
                spent += self._starts.wait_seconds  # the round behind a trial is not sent off early
            if self._catching_up.values and not self._drafting.issuperset(view.request_ids):
                spent += self._catching_up.seconds
        worst = (score[min(run, len(score) - 1)] - score[0] + spent) / score[0]
        expected = [sum(rate**i for i in range(1, length + 1)) for rate, length in zip(rates, lengths, strict=True)]
        loss = max(worst - self._question.worth.expected(expected) / len(room), worst / 4)
        tried = max(range(len(room)), key=lambda place: (bool(lengths[place]), rates[place]))
        if not self._begin_trial(loss, evidence[tried]):
            return (0,) * len(room)
        self._spoken = max(self._spoken, 0.5)
        for request, kind, length in zip(view.request_ids, evidence, lengths, strict=True):
            if length:
                self._acceptance.soften(request, kind)
        return lengths

    def _trial_reading(self, reading: Sequence[float], lengths: Sequence[int]) -> float:
        """Seconds of a trial that go into reading; the first of all may read for a while."""
        seconds, free = _of_drafted(reading, lengths), FIRST_READING / len(lengths) * self._score.plain(len(lengths))
        return seconds if self._draft.is_known or seconds > free else 0.0

    def _begin_trial(self, loss: float, evidence: int) -> bool:
        trial = self._trust.trial(loss, evidence)
        self._question.trial = trial or self._question.trial
        return trial is not None

    def _drew(self, outcome: RoundOutcome) -> frozenset[int]:
        copied = outcome.copied or (False,) * len(outcome.rows)
        columns = zip(outcome.request_ids, outcome.drafted, copied, strict=True)
        return frozenset(request for request, drafted, copy in columns if drafted and not copy)

    def _learn_costs(self, outcome: RoundOutcome, asked: frozenset[int], question: PendingQuestion) -> None:
        rows, longest = len(outcome.rows), max(outcome.drafted)
        # A tree counts as long as it is deep: what is learnt is what a round with a tree of that depth takes.
        if outcome.scored <= 2 * rows * (max(outcome.nodes or outcome.drafted) + 1):  # more is a prompt that came along
            self._score.add(rows, rows + _run(outcome), outcome.score_seconds + outcome.verify_seconds)
        if not asked:
            return
        if self._mixed:
            self._learn_drawn(outcome, question)
            return
        self._asking.time(outcome.draft_seconds)
        if longest:  # an n-gram table's drafts come to `trim` while all rows are greedy, and not beside a sampled one
            self._trims = question.proposed > 0
        proposed = max(longest, question.proposed, outcome.steps or 0)
        if proposed:
            self._learn_draft(outcome, proposed, asked, question)
        spoke = sum(map(bool, outcome.drafted)) / len(asked)
        self._spoken += (min(spoke, 1.0) - self._spoken) / SPOKEN_MEMORY

    def _learn_drawn(self, outcome: RoundOutcome, question: PendingQuestion) -> None:
        """What drawing cost and which class it is, from the rows that did not copy."""
        copied = outcome.copied or (False,) * len(outcome.rows)
        evidence = outcome.evidence or (0,) * len(outcome.rows)
        drawn = [i for i, copy in enumerate(copied) if outcome.drafted[i] and not copy]
        if not drawn:
            return
        self._drawn = evidence[drawn[0]]
        longest = max(outcome.drafted[i] for i in drawn)
        self._learn_draft(outcome, longest, frozenset(outcome.request_ids[i] for i in drawn), question)

    def _learn_draft(
        self, outcome: RoundOutcome, longest: int, requests: frozenset[int], question: PendingQuestion
    ) -> None:
        """What it took to draft up to `longest` tokens for `requests`, and to read for them first."""
        rows = len(outcome.rows) if outcome.steps is not None else len(requests)
        plain = self._score.plain(len(outcome.rows)) if self._score.knows_plain() else math.inf
        columns = zip(outcome.rows, outcome.request_ids, strict=True)
        unread = sum(question.unread.get(row, 0) for row, request in columns if request in requests)
        drafting = self._draft.table(rows, longest)[longest]
        if outcome.steps is not None and self._draft.is_known and not requests <= self._drafting:
            self._catching_up.add(0.0, max(outcome.draft_seconds - drafting, 0.0))
        if unread > ALONG and self._score.knows_plain():
            self._reading.add(unread, outcome.draft_seconds - drafting, self._score.plain_alone(len(outcome.rows)))
        self._draft.add(rows, longest, outcome.draft_seconds, requests <= self._drafting, plain)

    def _learn_acceptance(self, outcome: RoundOutcome) -> None:
        evidence = outcome.evidence or (0,) * len(outcome.rows)
        columns = (outcome.request_ids, evidence, outcome.drafted, outcome.accepted, outcome.ended)
        for request, kind, drafted, accepted, ended in zip(*columns, strict=True):
            if drafted:  # a drafter with nothing to say was not wrong
                self._acceptance.observe(request, kind, drafted, accepted, ended)
        if outcome.guessed is None:
            return
        copied = outcome.copied or (False,) * len(outcome.rows)
        for request, drafted, copy, guess in zip(
            outcome.request_ids, outcome.drafted, copied, outcome.guessed, strict=True
        ):
            if guess is not None and not (drafted and copy):  # not verified, but the token that came has judged it
                self._acceptance.observe(request, guess[0], 1, int(guess[1]), ended=False)

    def _record_outcome(self, outcome: RoundOutcome, asked: frozenset[int], question: PendingQuestion) -> None:
        """Compare the round with the plain rounds it replaced."""
        rows, drafted = len(outcome.rows), sum(outcome.drafted)
        plain = self._score.plain(rows)
        won = self._gain(outcome, question) - self._extra(outcome, plain)
        draft = outcome.draft_seconds / plain
        if not asked <= self._drafting and (question.is_first or not question.unread):
            draft = min(draft, 0.6)  # reading that nobody had counted on: it should not end a drafter's chance
        if asked:
            self._asking.add(won)
        if outcome.steps is None and question.is_known and not question.is_rest:
            self._rest.consider(won, draft, is_plain=not drafted)
        kept = sum(outcome.accepted) / rows
        if not asked and not self._mixed:
            draft = 0.0  # the drafter was not asked: the time is the host's
        if drafted or draft > CHEAP:
            tried = sum(min(a + 1, d) for a, d in zip(outcome.accepted, outcome.drafted, strict=True))
            self._trust.record_outcome(won - draft, kept, tried)
        if question.trial:
            self._trust.conclude(question.trial, won - draft, kept)
        elapsed = (outcome.draft_seconds + outcome.score_seconds + outcome.verify_seconds) / plain
        if drafted:
            self._pace += ((1 + kept) / max(elapsed, 0.1) - self._pace) / PACE_MEMORY
        self._trust.pass_time(min(elapsed, 4.0), 0.0 if drafted or draft > CHEAP else draft)

    def _gain(self, outcome: RoundOutcome, question: PendingQuestion) -> float:
        """Plain rounds that what was kept saves the call; rows may have left since the round was asked for."""
        is_whole = len(question.worth.tokens_left) == len(outcome.rows)
        return (question.worth if is_whole else Worth()).of(outcome.accepted) / len(outcome.rows)

    def _extra(self, outcome: RoundOutcome, plain: float) -> float:
        """Plain rounds that scoring the drafts cost, without what only a warm-up or a hiccup explains."""
        drafted = _run(outcome)
        if not drafted:
            return 0.0
        table = self._score.table(len(outcome.rows), drafted)
        believed = 1.5 * table[drafted] if drafted < len(table) else 2.2 * plain
        return min(outcome.score_seconds + outcome.verify_seconds, believed) / plain - 1


class Auto(CostModel):
    """What "auto" stands for: lengths by measured costs; in calls that name a seed, by a rule without a clock."""

    def for_seed(self) -> Policy:
        """A policy for one call: the same call draws the same random numbers for the same tokens."""
        return OwnAcceptance()


def _number(lengths: Sequence[int]) -> int:
    """Rows that have a draft."""
    return sum(map(bool, lengths))


def _one_of(lengths: Sequence[int], reading: Sequence[float]) -> list[int]:
    """The length of the row alone that takes the least reading before its draft."""
    chosen = min((i for i, length in enumerate(lengths) if length), key=lambda i: reading[i], default=0)
    return [length if i == chosen else 0 for i, length in enumerate(lengths)]


def _of_drafted(seconds: Sequence[float], lengths: Sequence[int]) -> float:
    """Of the rows that have a draft."""
    return sum(row_seconds for row_seconds, length in zip(seconds, lengths, strict=True) if length)


def _run(outcome: RoundOutcome) -> int:
    """Positions that were run for drafts, those included that stand behind the end of a shorter one."""
    return sum(outcome.drafted) if outcome.steps is None else outcome.steps * len(outcome.rows)


class AskingValue:
    """What asking a drafter whose drafts can be trimmed has been worth."""

    def __init__(self) -> None:
        self._times = Samples()
        self.gain = 0.5  # plain rounds won per asking, before the cost of drafting; hopeful at first
        self._weight = 2.0

    @property
    def seconds(self) -> float:
        return self._times.seconds if self._times.values else 0.0

    def time(self, seconds: float) -> None:
        self._times.add(0.0, seconds)

    def add(self, gain: float) -> None:
        self._weight = min(self._weight + 1, ASK_MEMORY)
        self.gain += (gain - self.gain) / self._weight

    def soften(self) -> None:
        """Before asking again after a pause: let the answer count."""
        self._weight = min(self._weight, 2.0)
