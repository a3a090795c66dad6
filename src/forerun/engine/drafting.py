"""The drafter's side of a round: what policy and drafter are asked, and what becomes of their mistakes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from forerun.cache.base import CacheFull
from forerun.drafters.base import Drafter, empty_draft, shares_rows
from forerun.engine.branching import depths_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.draft_check import checked, is_ours
from forerun.engine.faults import Faults
from forerun.engine.given import GivenDraft, first_tokens
from forerun.engine.laws import tokens_of
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


class Drafted(NamedTuple):
    """A draft as it is verified."""

    draft: Draft
    guesses: tuple[int | None, ...]  # the first token of each deterministic draft before the policy cut it


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
        self._breaks_word = False  # said that it copies, and then gave a draft with a law of its own
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

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        """How much to draft for each row."""
        if self.drafter is None:
            return (0,) * len(view.rows)
        try:
            return self._within(self.policy.lengths(view), view.max_lengths)
        except Exception as error:
            self.faults.report(self.policy.unwrapped, error, PLAIN)
            return (0,) * len(view.rows)

    @property
    def finds_copies(self) -> bool:
        """Whether all drafts are copies that the host finds: a recorded round is given their tokens."""
        return self.drafter is not None and self._flag(self.drafter, "copies") and not self._breaks_word

    def given(self, batch: Sequence[Row], view: BatchView) -> GivenDraft | None:
        """What a drafter that copies finds behind each row's text, cut to what the policy wants verified.

        None where it found no copies after all, but drafts with a law of their own: they are for rounds step by step.
        """
        rows, lengths = tuple(batch), self.lengths(view)
        if not any(lengths):
            return GivenDraft.nothing(rows)
        # Copies follow from the text alone, so any uniforms do. A drafter of ours finds them where the text is.
        device = torch.device("cpu") if self._is_ours else self.target.device
        uniforms = torch.zeros(len(rows), max(lengths), dtype=torch.float64, device=device)
        params = LawParams.stack([row.request.params for row in rows], device)
        found = self._propose(rows, view, lengths, None, params, uniforms)
        if found is None:
            return GivenDraft.nothing(rows)
        if found.tree is not None or not found.deterministic or type(found.law) is not PointMass:
            self._breaks_word = True
            return None
        kept = self._trimmed(found, view)
        return GivenDraft(rows, tokens_of(kept), found.evidence or (0,) * len(rows), first_tokens(found))

    def prepare(self, batch: Sequence[Row]) -> None:
        """Let a drafter that copies take in the texts so far while the device works on a round."""
        if self.finds_copies:
            self.notify("prepare", [row.number for row in batch], [row.history for row in batch])

    def draft(self, batch: Sequence[Row], view: BatchView, params: LawParams, keys: Keys) -> Drafted:
        """One draft for every row of the round, perhaps of no token."""
        lengths = self.lengths(view)
        copies = self._copy_lengths(view)
        if not any(lengths) and not any(copies or ()):
            return self._nothing(batch)
        assert self.drafter is not None
        uniforms = draft_uniforms(keys, self._num_draws(max(lengths)), self.rule)
        with self.passes.lent(batch) if self.passes is not None else nullcontext():
            draft = self._propose(batch, view, lengths, copies, params, uniforms)
        if draft is None:
            return self._nothing(batch)
        guesses = first_tokens(draft)
        if draft.deterministic or draft.cuttable is not None:
            draft = self._trimmed(draft, view)
        return Drafted(draft, guesses)

    def _propose(
        self,
        batch: Sequence[Row],
        view: BatchView,
        lengths: tuple[int, ...],
        copies: tuple[int, ...] | None,
        params: LawParams,
        uniforms: Tensor,
    ) -> Draft | None:
        """The drafter's answer, where it is one."""
        assert self.drafter is not None
        context = DraftContext(
            rows=view.rows,
            histories=tuple(row.history for row in batch),
            max_lengths=lengths,
            params=params,
            uniforms=uniforms,
            adjusters=tuple(row.adjuster for row in batch),
            vocab_size=self.target.vocab_size,
            device=uniforms.device,
            copy_lengths=copies,
            kernels=self.target.kernels,
        )
        try:
            return checked(self.drafter.propose(context), context, self.rule, self.target, self._is_ours)
        except CacheFull:  # nobody's fault: fewer rows will do
            raise
        except Exception as error:
            self.faults.report(self._given, error, PLAIN)
            return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the policy know what became of a round."""
        try:
            self.policy.observe(outcome)
        except Exception as error:
            self.faults.report(self.policy.unwrapped, error, "it learns nothing from such rounds")

    @property
    def capture_seconds(self) -> float:
        return 0.0 if self.passes is None else self.passes.runner.recorder.seconds

    def notify(self, verb: str, *arguments: Any) -> None:
        """Call `drafter.verb(*arguments)`. One that fails drafts worse, or not at all; the text is the target's."""
        if self.drafter is None:
            return
        if verb == "release":
            self._rows.discard(arguments[0])
        if verb == "admit" and shares_rows(self.drafter):
            self._check_shared()
            self._rows.add(arguments[0])
        try:
            getattr(self.drafter, verb)(*arguments)
        except Exception as error:
            self.faults.report(self._given, error, PLAIN)

    def _nothing(self, batch: Sequence[Row]) -> Drafted:
        draft = empty_draft(len(batch), self.target.vocab_size, self.target.device)
        return Drafted(draft, (None,) * len(batch))

    def _trimmed(self, draft: Draft, view: BatchView) -> Draft:
        seen = draft if draft.tree is None else replace(draft, lengths=depths_of(draft))
        try:
            kept = self._within(self.policy.trim(view, seen), _rooms(draft, seen))
        except Exception as error:
            self.faults.report(self.policy.unwrapped, error, "such drafts are kept whole")
            kept = kept_whole(view, seen)
        return _cut(draft, kept)

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

    def _check_shared(self) -> None:
        """Engines number their rows alike: a drafter that keeps state by these numbers mixes up two of them."""
        known = vars(self._given) if hasattr(self._given, "__dict__") else {}
        last: ReferenceType[Drafting] | None = known.get(LAST_USER)
        other = None if last is None else last()
        known[LAST_USER] = ref(self)
        if other is not None and other is not self and other._rows and not self._warned_of_sharing:
            self._warned_of_sharing = True
            warnings.warn(
                f"{type(self._given).__name__} keeps rows of two decoders and cannot tell them apart, so drafts get "
                "worse; make a second one, or give the class a method clone() that returns one without rows",
                ForerunWarning, stacklevel=4,
            )  # fmt: skip

    def _num_draws(self, longest: int) -> int:
        assert self.drafter is not None
        try:
            return self.drafter.num_draws(longest)
        except Exception as error:
            self.faults.report(self._given, error, PLAIN)
            return longest

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
        try:
            return bool(getattr(whose, name))
        except Exception as error:
            self.faults.report(whose.unwrapped, error, f"it is taken for one without {name}")
            return False

    @property
    def _given(self) -> Any:
        """The user's own object, which errors are reported of."""
        return None if self.drafter is None else self.drafter.unwrapped


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
