"""The drafter's side of a round: what policy and drafter are asked, and what becomes of their mistakes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from forerun.drafters.fresh import has_fresh
from forerun.drafters.silence import silent
from forerun.engine.branching import depths_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.draft_check import checked, is_ours
from forerun.engine.faults import Faults
from forerun.engine.row import Row
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.random import draft_uniforms
from forerun.models.scorer import Scorer
from forerun.policy.constant import kept_whole
from forerun.rules import AnyRule
from forerun.types import BatchView, Draft, DraftContext, Drafter, Keys, LawParams, Policy, RoundOutcome, Rule

_SIDES: WeakSet[Drafting] = WeakSet()  # of all engines, to notice when two of them share what they should not


PLAIN = "such rounds decode plainly"


class Drafting:
    """Asks policy and drafter. Either may fail: it costs a draft, never the round."""

    def __init__(
        self, drafter: Drafter | None, policy: Policy, target: Scorer, rule: AnyRule, faults: Faults | None = None
    ) -> None:
        self.drafter, self.policy, self.target, self.rule = drafter, policy, target, rule
        self.faults = faults or Faults()
        self.passes: DraftPasses | None = None  # of a draft model, where they can be recorded
        self._is_ours = is_ours(drafter)
        self._warned_of_sharing = False
        self._rows: set[int] = set()  # that a drafter which is nobody's own was told of
        _SIDES.add(self)
        if getattr(drafter, "makes_trees", False):
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
        return self._flag(self.drafter, "is_mixed")

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        """How much to draft for each row."""
        if self.drafter is None:
            return (0,) * len(view.rows)
        try:
            return self._within(self.policy.lengths(view), view.max_lengths)
        except Exception as error:
            self.faults.report(self.policy, error, PLAIN)
            return (0,) * len(view.rows)

    def draft(self, batch: Sequence[Row], view: BatchView, params: LawParams, keys: Keys) -> Draft:
        """One draft for every row of the round, perhaps of no token."""
        lengths = self.lengths(view)
        copies = self._copy_lengths(view)
        if not any(lengths) and not any(copies or ()):
            return self._nothing(batch)
        assert self.drafter is not None
        try:
            context = self._context(batch, view, lengths, copies, params, keys)
            with self.passes.lent(batch) if self.passes is not None else nullcontext():
                draft = self.drafter.propose(context)
            draft = checked(draft, context, self.rule, self.target, self._is_ours)
        except Exception as error:
            self.faults.report(self.drafter, error, PLAIN)
            return self._nothing(batch)
        if draft.deterministic or draft.cuttable is not None:
            return self._trimmed(draft, view)
        return draft

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the policy know what became of a round."""
        try:
            self.policy.observe(outcome)
        except Exception as error:
            self.faults.report(self.policy, error, "it learns nothing from such rounds")

    @property
    def capture_seconds(self) -> float:
        return 0.0 if self.passes is None else self.passes.runner.recorder.seconds

    def notify(self, verb: str, *arguments: Any) -> None:
        """Let the drafter know. One that stumbles over it drafts worse, or not at all; the text is the target's."""
        if verb == "release":
            self._rows.discard(arguments[0])
        if (method := getattr(self.drafter, verb, None)) is not None:
            if verb == "admit" and not has_fresh(self.drafter):
                self._check_shared()
                self._rows.add(arguments[0])
            try:
                method(*arguments)
            except Exception as error:
                self.faults.report(self.drafter, error, PLAIN)

    def _nothing(self, batch: Sequence[Row]) -> Draft:
        return silent(len(batch), self.target.vocab_size, self.target.device)

    def _context(
        self,
        batch: Sequence[Row],
        view: BatchView,
        lengths: tuple[int, ...],
        copies: tuple[int, ...] | None,
        params: LawParams,
        keys: Keys,
    ) -> DraftContext:
        return DraftContext(
            rows=view.rows,
            histories=tuple(row.history for row in batch),
            max_lengths=lengths,
            params=params,
            uniforms=draft_uniforms(keys, self._num_draws(max(lengths)), self.rule),
            adjusters=tuple(row.adjuster for row in batch),
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            copy_lengths=copies,
            kernels=self.target.kernels,
        )

    def _trimmed(self, draft: Draft, view: BatchView) -> Draft:
        seen = draft if draft.tree is None else replace(draft, lengths=depths_of(draft))
        try:
            kept = self._within(self.policy.trim(view, seen), _rooms(draft, seen))
        except Exception as error:
            self.faults.report(self.policy, error, "such drafts are kept whole")
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
        self.faults.report(self.policy, error, "such lengths are cut to the room there is")
        return tuple(map(min, lengths, rooms))

    def _check_shared(self) -> None:
        """Engines number their rows alike: one that keeps state by these numbers mixes up what two of them say."""
        others = [side for side in _SIDES if side is not self and side.drafter is self.drafter and side._rows]
        if others and not self._warned_of_sharing:
            self._warned_of_sharing = True
            warnings.warn(
                f"{type(self.drafter).__name__} keeps rows of two decoders and cannot tell them apart, so drafts get "
                "worse; make a second one, or give the class a method fresh() that returns one without rows",
                ForerunWarning, stacklevel=4,
            )  # fmt: skip

    def _num_draws(self, longest: int) -> int:
        ask = getattr(self.drafter, "num_draws", None)
        return longest if ask is None else ask(longest)

    def _copy_lengths(self, view: BatchView) -> tuple[int, ...] | None:
        """Room for copies beside drawn drafts; a policy that says nothing of it treats both alike."""
        ask = getattr(self.policy, "copy_lengths", None)
        if ask is None or not view.is_mixed:
            return None
        try:
            return self._within(ask(view), view.max_lengths)
        except Exception as error:
            self.faults.report(self.policy, error, "copies get no more room than other drafts")
            return None

    def _flag(self, whose: object, name: str) -> bool:
        """What an object says of itself; False where it says nothing, or fails to."""
        try:
            return bool(getattr(whose, name, False))
        except Exception as error:
            self.faults.report(whose, error, f"it is taken for one without {name}")
            return False


def _rooms(draft: Draft, seen: Draft) -> list[int]:
    """The most that a policy may keep of each row: what it says of rows whose draft was sampled is not heeded."""
    own = seen.lengths.tolist()
    if draft.cuttable is None:
        return own
    return [length if cut else sys.maxsize for length, cut in zip(own, draft.cuttable, strict=True)]


def _cut(draft: Draft, lengths: tuple[int, ...]) -> Draft:
    """Cut what may be cut: a sampled draft keeps its length, or its law would be bent."""
    if draft.cuttable is not None:
        own = draft.lengths.tolist()
        lengths = tuple(n if cut else o for n, o, cut in zip(lengths, own, draft.cuttable, strict=True))
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
