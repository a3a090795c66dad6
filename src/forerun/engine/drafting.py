"""The drafter's side of a round: what policy and drafter are asked, and what becomes of their mistakes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import starmap
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch

from forerun.cache.base import CacheFull
from forerun.drafters.base import Drafter, empty_draft, shares_rows
from forerun.engine.branching import depths_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.draft_check import checked, is_ours
from forerun.engine.faults import Faults
from forerun.engine.host_draft import Guess, HostDraft, guesses_of
from forerun.engine.laws import params_of, tokens_of
from forerun.engine.row import Row
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.laws import PointMass
from forerun.math.random import draft_uniforms
from forerun.models.scorer import Scorer
from forerun.policy.base import Policy, kept_whole, wrapped
from forerun.rules import AnyRule
from forerun.types import BatchView, Draft, DraftContext, Keys, LawParams, RoundOutcome, Rule

PLAIN = "such rounds decode plainly"
# Attribute of a drafter that has no clone of its own: a weak reference to the engine side that admitted a row last.
LAST_USER = "_forerun_last_user"


T = TypeVar("T")


class Drafted(NamedTuple):
    """A draft as it is verified."""

    draft: Draft
    guesses: tuple[Guess | None, ...]  # of deterministic drafts before the policy cut them


class Drafting:
    """Asks policy and drafter. Either may fail: it costs a draft, never the round."""

    def __init__(
        self, drafter: Drafter | None, policy: Policy, target: Scorer, rule: AnyRule, faults: Faults | None = None
    ) -> None:
        self.drafter, self.target, self.rule = drafter, target, rule
        self.policy = wrapped(policy)
        self.faults = faults or Faults()
        self.passes: DraftPasses | None = None  # of a draft model, where they can be recorded
        self._is_ours = drafter is not None and is_ours(drafter)
        self._warned_of_sharing = False
        # What finds copies for recorded rounds: the drafter itself, or the part of it that is asked first.
        self.copier = None if drafter is None else drafter.copying_part()
        self._rows: set[int] = set()  # that a drafter without a clone of its own holds for this engine
        if drafter is not None and drafter.makes_trees:
            _check_trees(target, rule)

    @property
    def is_fixed(self) -> bool:
        """Whether lengths do not depend on what became of the rounds before."""
        return self.drafter is None or self._flag(self.policy, "is_fixed")

    @property
    def runs_ahead(self) -> bool:
        """Whether lengths may be asked for while the round before is still under way."""
        return self.is_fixed or self._flag(self.policy, "runs_ahead")

    @property
    def is_mixed(self) -> bool:
        """Whether the drafter both copies and draws."""
        return self.drafter is not None and self._flag(self.drafter, "is_mixed")

    @property
    def needs_clock(self) -> bool:
        """Whether drawn drafts are for policies that measure."""
        return self.drafter is not None and self._flag(self.drafter, "needs_clock")

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        """How much to draft for each row."""
        if self.drafter is None:
            return (0,) * len(view.rows)
        none = (0,) * len(view.rows)
        return self._ask(self.policy, lambda: self._within(self.policy.lengths(view), view.max_lengths), none, PLAIN)

    def unread(self, batch: Sequence[Row]) -> tuple[int, ...]:
        """Tokens of each row that would have to be taken in before a draft is drawn; empty where there are none."""
        drafter, none = self.drafter, tuple[int, ...]()
        if drafter is None:
            return none
        known = [(row.number, len(row.history)) for row in batch if row.number >= 0]
        consequence = "what it has not read is not counted"
        counts = self._ask(drafter, lambda: tuple(starmap(drafter.num_unread, known)), none, consequence)
        return counts if any(counts) else none

    @property
    def takes_predictions(self) -> bool:
        return self.drafter is not None and self.drafter.takes_predictions

    def predict(self, row: Row) -> None:
        """Also where nothing is predicted: a row number may have had another request's prediction."""
        if self.takes_predictions:
            self.notify("predict", row.number, row.request.prediction, len(row.request.prompt))

    def are_predictions(self, evidence: Sequence[int]) -> tuple[bool, ...]:
        """Which drafts, by their evidence, are of a prediction."""
        drafter, none = self.drafter, (False,) * len(evidence)
        assert drafter is not None
        return self._ask(
            drafter, lambda: tuple(map(drafter.is_prediction, evidence)), none, "such drafts count as drawn"
        )

    @property
    def finds_copies(self) -> bool:
        """Whether the host finds copies that a recorded round can be given."""
        return self.copier is not None

    def host_draft(self, batch: Sequence[Row], view: BatchView) -> HostDraft | None:
        """Copies that are found behind the rows' texts, as far as the policy wants them, and what others may draw.

        None where what was found are not copies, but drafts with a law of their own: those are for rounds step by step.
        """
        rows, lengths = tuple(batch), self.lengths(view)
        drawn, rooms = (lengths, self._copy_lengths(view) or lengths) if view.is_mixed else ((0,) * len(rows), lengths)
        draft = self._copies(rows, view, rooms) if any(rooms) else None
        if draft is None:
            return self.without_copies(rows, drawn)
        if draft.tree is not None or not draft.deterministic or type(draft.law) is not PointMass:
            self.copier = None
            return None
        keep = self._kept_copies(view, lengths, draft) if view.is_mixed else self._trimmed(draft, view).lengths.tolist()
        copies = [tokens[:length] for tokens, length in zip(tokens_of(draft), keep, strict=True)]
        columns = zip(draft.evidence or (0,) * len(rows), copies, strict=True)
        return HostDraft(
            rows,
            copies,
            tuple(0 if copy else length for copy, length in zip(copies, drawn, strict=True)),
            tuple(kind if copy or not view.is_mixed else self._drawn_evidence for kind, copy in columns),
            guesses_of(draft),
        )

    def without_copies(self, batch: Sequence[Row], drawn: tuple[int, ...]) -> HostDraft:
        """For a round in which no row copies."""
        return HostDraft.without_copies(batch, drawn, self._drawn_evidence)

    def prepare(self, batch: Sequence[Row]) -> None:
        """Let a drafter that copies take in the texts so far while the device works on a round."""
        if self.copier is not None:
            self.notify("prepare", [row.number for row in batch], [row.history for row in batch])

    def draft(self, batch: Sequence[Row], view: BatchView, params: LawParams, keys: Keys) -> Drafted:
        """One draft for every row of the round, perhaps of no token."""
        lengths = self.lengths(view)
        copies = self._copy_lengths(view)
        if not any(lengths) and not any(copies or ()):
            return self._nothing(batch)
        assert self.drafter is not None
        copies_found: list[Draft] = []

        def keep_copies(draft: Draft) -> tuple[int, ...]:
            copies_found.append(draft)
            return self._kept_copies(view, lengths, draft)

        context = self._context(batch, view, lengths, params)
        try:
            numbers = draft_uniforms(keys, self._num_draws(max(lengths)), self.rule) if any(lengths) else None
        except Exception as error:  # a drafter that cannot say how many numbers it draws
            self.faults.report(self.drafter.unwrapped, error, PLAIN)
            return self._nothing(batch)
        context = replace(
            context,
            uniforms=context.uniforms if numbers is None else numbers,  # copies are not drawn
            copy_lengths=copies,
            keep_copies=keep_copies if view.is_mixed else None,
        )
        with self.passes.lent(batch) if self.passes is not None else nullcontext():
            draft = self._propose(self.drafter, context)
        if draft is None:
            return self._nothing(batch)
        if copies_found:
            return Drafted(draft, guesses_of(copies_found[0]))
        guesses = guesses_of(draft)
        if draft.deterministic or draft.cuttable is not None:
            draft = self._trimmed(draft, view)
        return Drafted(draft, guesses)

    def _copies(self, rows: Sequence[Row], view: BatchView, rooms: tuple[int, ...]) -> Draft | None:
        """What the copying part of the drafter finds."""
        assert self.copier is not None
        # Copies follow from the text alone, so any uniforms do. A drafter of ours finds them where the text is.
        device = torch.device("cpu") if self._is_ours else self.target.device
        params = params_of(rows, device)
        return self._propose(self.copier, self._context(rows, view, rooms, params))

    def _kept_copies(self, view: BatchView, lengths: tuple[int, ...], draft: Draft) -> tuple[int, ...]:
        """How much of each copy to verify, where rows without one may be drawn drafts of `lengths`."""
        copied: list[int] = draft.lengths.tolist()
        if not any(copied):
            return tuple(copied)
        known = zip(draft.evidence or (0,) * len(copied), copied, strict=True)
        seen = replace(
            draft,
            lengths=torch.tensor([copy or length for copy, length in zip(copied, lengths, strict=True)]),
            deterministic=False,
            cuttable=tuple(map(bool, copied)),
            evidence=tuple(kind if copy else self._drawn_evidence for kind, copy in known),
        )
        kept = self._trim_lengths(view, seen, [length or sys.maxsize for length in copied])
        return tuple(min(length, copy) for length, copy in zip(kept, copied, strict=True))

    def _context(
        self, batch: Sequence[Row], view: BatchView, lengths: tuple[int, ...], params: LawParams
    ) -> DraftContext:
        """A question without random numbers."""
        device = params.temperature.device
        return DraftContext(
            rows=view.rows,
            histories=tuple(row.history for row in batch),
            max_lengths=lengths,
            params=params,
            uniforms=torch.zeros(len(batch), max(lengths), dtype=torch.float64, device=device),
            adjusters=tuple(row.adjuster for row in batch),
            vocab_size=self.target.vocab_size,
            device=device,
            kernels=self.target.kernels,
        )

    def _propose(self, drafter: Drafter, context: DraftContext) -> Draft | None:
        """The drafter's answer, where it is one; `drafter` may be the part of it that copies."""
        assert self.drafter is not None
        try:
            return checked(drafter.propose(context), context, self.rule, self.target, self._is_ours)
        except CacheFull:  # nobody's fault: fewer rows will do
            raise
        except Exception as error:
            self.faults.report(self.drafter.unwrapped, error, PLAIN)
            return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the policy know what became of a round."""
        self._ask(self.policy, lambda: self.policy.observe(outcome), None, "it learns nothing from such rounds")

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """Let the policy know which requests have ended, also those of whose end no round has told."""
        consequence = "what it keeps of requests that have ended is its own"
        self._ask(self.policy, lambda: self.policy.forget(request_ids), None, consequence)

    def policy_for_seed(self) -> Policy:
        """The policy of a sampled call that names a seed: the one there is, where it does not say another."""
        consequence = "in calls that name a seed it chooses lengths as in others"
        return self._ask(self.policy, lambda: wrapped(self.policy.for_seed()), self.policy, consequence)

    @property
    def capture_seconds(self) -> float:
        return 0.0 if self.passes is None else self.passes.runner.recorder.seconds

    def notify(self, verb: str, *arguments: Any) -> None:
        """Call `drafter.verb(*arguments)`. One that fails drafts worse, or not at all; the text is the target's."""
        if (drafter := self.drafter) is None:
            return
        if verb == "release":
            self._rows.discard(arguments[0])
        if verb == "admit" and shares_rows(drafter):
            self._check_shared(drafter.unwrapped)
            self._rows.add(arguments[0])
        self._ask(drafter, lambda: getattr(drafter, verb)(*arguments), None, PLAIN)

    def _nothing(self, batch: Sequence[Row]) -> Drafted:
        draft = empty_draft(len(batch), self.target.vocab_size, self.target.device)
        return Drafted(draft, (None,) * len(batch))

    def _trimmed(self, draft: Draft, view: BatchView) -> Draft:
        seen = draft if draft.tree is None else replace(draft, lengths=depths_of(draft))
        return _cut(draft, self._trim_lengths(view, seen, _rooms(draft, seen)))

    def _trim_lengths(self, view: BatchView, seen: Draft, rooms: Sequence[int]) -> tuple[int, ...]:
        """What the policy keeps of a draft that it has seen."""
        try:
            return self._within(self.policy.trim(view, seen), rooms)
        except Exception as error:
            self.faults.report(self.policy.unwrapped, error, "such drafts are kept whole")
            return kept_whole(view, seen)

    def _within(self, lengths: Any, rooms: Sequence[int]) -> tuple[int, ...]:
        """A policy's answer, if it is one; where it asks for more than there is room for, what there is room for."""
        if not isinstance(lengths, tuple | list) or len(lengths) != len(rooms):
            raise InvalidArgument(f"a policy answered {lengths!r}: give {len(rooms)} lengths, one a row")
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in lengths):
            raise InvalidArgument(f"a policy answered {lengths!r}: lengths are whole numbers >= 0")
        if all(n <= room for n, room in zip(lengths, rooms, strict=True)):
            return tuple(lengths)
        error = InvalidArgument(f"a policy answered {lengths!r} where there is room for {list(rooms)}")
        self.faults.report(self.policy.unwrapped, error, "such lengths are cut to the room there is")
        return tuple(map(min, lengths, rooms))

    def _check_shared(self, drafter: Any) -> None:
        """Engines number their rows alike: a drafter that keeps state by these numbers mixes up two of them."""
        known = vars(drafter) if hasattr(drafter, "__dict__") else {}
        last: ReferenceType[Drafting] | None = known.get(LAST_USER)
        other = None if last is None else last()
        known[LAST_USER] = ref(self)
        if other is not None and other is not self and other._rows and not self._warned_of_sharing:
            self._warned_of_sharing = True
            warnings.warn(
                f"{type(drafter).__name__} keeps rows of two decoders and cannot tell them apart, so drafts get "
                "worse; make a second one, or give the class a method clone() that returns one without rows",
                ForerunWarning, stacklevel=4,
            )  # fmt: skip

    def _num_draws(self, longest: int) -> int:
        drafter = self.drafter
        assert drafter is not None
        return self._ask(drafter, lambda: drafter.num_draws(longest), longest, PLAIN)

    def _copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        """Room for copies beside drawn drafts; a policy that says nothing of it treats both alike."""
        if not view.is_mixed:
            return None
        try:
            lengths = self.policy.copy_lengths(view)
            return None if lengths is None else self._within(lengths, view.max_lengths)
        except Exception as error:
            self.faults.report(self.policy.unwrapped, error, "copies get no more room than other drafts")
            return None

    def _flag(self, whose: Policy | Drafter, name: str) -> bool:
        """A flag, which may be a user's property; False where reading it fails."""
        return self._ask(whose, lambda: bool(getattr(whose, name)), False, f"it is taken for one without {name}")

    @property
    def _drawn_evidence(self) -> int:
        return 0 if self.drafter is None else self.drafter.drawn_evidence

    def _ask(self, whose: Policy | Drafter, question: Callable[[], T], otherwise: T, consequence: str) -> T:
        """The answer to a question, or `otherwise` where whoever was asked fails."""
        try:
            return question()
        except Exception as error:
            self.faults.report(whose.unwrapped, error, consequence)
            return otherwise


def _rooms(draft: Draft, seen: Draft) -> list[int]:
    """The most that a policy may keep of each row: its answer for rows whose draft was sampled is not used."""
    lengths: list[int] = seen.lengths.tolist()
    if draft.cuttable is None:
        return lengths
    return [length if cut else sys.maxsize for length, cut in zip(lengths, draft.cuttable, strict=True)]


def _cut(draft: Draft, lengths: tuple[int, ...]) -> Draft:
    """Cut what may be cut: a sampled draft keeps its length, or its law would be bent."""
    if draft.cuttable is not None:
        drafted = draft.lengths.tolist()
        lengths = tuple(n if cut else whole for n, whole, cut in zip(lengths, drafted, draft.cuttable, strict=True))
    kept, width = torch.tensor(lengths, device=draft.lengths.device), max(lengths)
    tree = draft.tree and replace(draft.tree, parents=draft.tree.parents[:, :width])
    return replace(draft, tokens=draft.tokens[:, :width], lengths=kept, tree=tree if width else None)


def _check_trees(target: Scorer, rule: AnyRule) -> None:
    """Said when the engine is made, not in the middle of a text."""
    if rule is not Rule.TOKEN:
        name = str(rule) if isinstance(rule, Rule) else rule.name
        raise InvalidArgument(
            f"rule={name!r} cannot judge trees, whose own rules follow from how siblings were drawn; decode with "
            "rule='token', or without a tree"
        )
    target.check_trees()
