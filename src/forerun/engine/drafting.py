"""The drafter's side of a round: what it is asked, whether its answer is one, and what becomes of its mistakes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from forerun.drafters.fresh import has_fresh
from forerun.drafters.silence import silent
from forerun.engine.branching import check_tree, depths_of
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.row import Row
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.random import draft_uniforms
from forerun.models.scorer import Scorer
from forerun.rules import AnyRule
from forerun.types import BatchView, Draft, DraftContext, Drafter, Keys, LawParams, Policy, Rule

_SIDES: WeakSet[DraftSide] = WeakSet()  # of all engines, to notice when two of them share what they should not


class DraftSide:
    """Asks policy and drafter. A drafter that fails costs its draft, never the round."""

    def __init__(self, drafter: Drafter | None, policy: Policy, target: Scorer, rule: AnyRule) -> None:
        self.drafter, self.policy, self.target, self.rule = drafter, policy, target, rule
        self.passes: DraftPasses | None = None  # of a draft model, where they can be recorded
        self._warned = self._warned_of_sharing = False
        self._rows: set[int] = set()  # that a drafter which is nobody's own was told of
        _SIDES.add(self)
        if getattr(drafter, "makes_trees", False):
            _check_trees(target, rule)

    @property
    def is_fixed(self) -> bool:
        """Whether lengths do not depend on what became of the rounds before."""
        return self.drafter is None or bool(getattr(self.policy, "is_fixed", False))

    @property
    def runs_ahead(self) -> bool:
        """Whether lengths may be asked for while the round before is still under way."""
        return self.is_fixed or bool(getattr(self.policy, "runs_ahead", False))

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        """How much to draft for each row."""
        return self.policy.lengths(view) if self.drafter is not None else (0,) * len(view.rows)

    def draft(self, batch: Sequence[Row], view: BatchView, params: LawParams, keys: Keys) -> Draft:
        """One draft for every row of the round, perhaps of no token."""
        lengths = self.lengths(view)
        copies = self._copy_lengths(view)
        if not any(lengths) and not any(copies or ()):
            return silent(len(batch), self.target.vocab_size, self.target.device)
        assert self.drafter is not None
        context = DraftContext(
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
        try:
            with self.passes.lent(batch) if self.passes is not None else nullcontext():
                draft = self.drafter.propose(context)
            _check(draft, context, self.rule)
        except Exception as error:
            self._warn(error)
            return silent(len(batch), self.target.vocab_size, self.target.device)
        if not draft.deterministic and draft.cuttable is None:
            return draft
        seen = draft if draft.tree is None else replace(draft, lengths=depths_of(draft))
        return _trimmed(draft, self.policy.trim(view, seen))

    @property
    def capture_seconds(self) -> float:
        return 0.0 if self.passes is None else self.passes.runner.recorder.seconds

    def tell(self, verb: str, *arguments: Any) -> None:
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
                self._warn(error)

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
        return ask(view) if ask is not None and view.is_mixed else None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            what = f"{type(self.drafter).__name__} failed ({type(error).__name__}: {error})"
            warnings.warn(f"{what}; such rounds decode plainly", ForerunWarning, stacklevel=4)


def _trimmed(draft: Draft, lengths: tuple[int, ...]) -> Draft:
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


def _check(draft: Draft, context: DraftContext, rule: AnyRule) -> None:
    """A drafter's answer must be one: right shapes, within the room it was given, tokens the target knows."""
    if draft.tokens.shape[0] != len(context.rows) or draft.lengths.shape != (len(context.rows),):
        raise InvalidArgument(f"draft of shape {tuple(draft.tokens.shape)} for {len(context.rows)} rows")
    copies = context.copy_lengths or context.max_lengths
    rooms = [max(pair) for pair in zip(context.max_lengths, copies, strict=True)]
    if draft.tree is not None:
        check_tree(draft, rooms, rule is Rule.TOKEN)
        rooms = [draft.width] * len(rooms)  # of its depth there is a bound, of its size there is none
    for tokens, length, most in zip(draft.tokens.tolist(), draft.lengths.tolist(), rooms, strict=True):
        if not 0 <= length <= min(most, len(tokens)):
            raise InvalidArgument(f"draft of length {length} where at most {min(most, len(tokens))} was asked for")
        if any(not 0 <= token < context.vocab_size for token in tokens[:length]):
            raise InvalidArgument(f"drafted token outside the target's vocabulary of {context.vocab_size}")
