"""Several drafters, one behind the other: each row takes the first draft that is not empty."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from forerun.drafters.base import Drafter, as_drafter
from forerun.errors import InvalidArgument
from forerun.math.laws import MixedLaw, PointMass, logits_at, logits_of
from forerun.types import Draft, DraftContext, Law, Siblings, TreeShape

if TYPE_CHECKING:
    from forerun.drafters.device import DeviceDrafter

# Each drafter has this many evidence classes of its own; higher ones count as its highest.
CLASSES = 16


class Chain(Drafter):
    """Asks drafters in order; each row takes the first draft that is not empty.

    Put the cheap and selective ones first: `Chain(PromptLookup(min_ngram=2), NgramTable.load(path))`. Whether a draft
    is empty must follow from the history alone: to draw a token, look at it and then drop it biases the law.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise InvalidArgument("Chain() has no drafters: give it at least one")
        parts: list[Drafter] = []
        for drafter in map(as_drafter, drafters):  # chains are flattened, so that evidence classes stay apart
            parts += drafter.parts if isinstance(drafter, Chain) else [drafter]
        self.parts = tuple(parts)
        self.copies = all(drafter.copies for drafter in parts)
        self.is_mixed = len({drafter.copies for drafter in parts}) > 1
        # Those asked before anything is sampled: the policy may then choose between a copy and a drawn draft.
        self._num_copying = next((i for i, drafter in enumerate(parts) if not drafter.copies), len(parts))
        self.drawn_evidence = self._num_copying * CLASSES
        self.makes_trees = any(drafter.makes_trees for drafter in parts)
        self.needs_clock = any(drafter.needs_clock for drafter in parts)
        self.takes_predictions = any(drafter.takes_predictions for drafter in parts)

    def clone(self) -> Self:
        """A chain of clones."""
        twin = copy.copy(self)
        twin.parts = tuple(drafter.clone() for drafter in self.parts)
        return twin

    def num_draws(self, longest: int) -> int:
        """Uniforms a round needs: each row is drafted for by one drafter."""
        return max(longest, *(drafter.num_draws(longest) for drafter in self.parts))

    def propose(self, context: DraftContext) -> Draft:
        """The first draft of each row that is not empty; drafters for which no row is left are not asked."""
        rest, answers = self._ask(context, range(self._num_copying))
        if context.keep_copies is not None and answers:
            answers = _shortened(answers, context.keep_copies(_combine(answers, context)))
            taken = [any(answer.takes[b] for answer in answers) for b in range(len(context.rows))]
            rest = _without(context, taken)
        more = self._ask(rest, range(self._num_copying, len(self.parts)))[1]
        draft = _combine([*answers, *more], context)
        return replace(draft, tree=_tree([*answers, *more], draft)) if self.makes_trees else draft

    def _ask(self, context: DraftContext, numbers: range) -> tuple[DraftContext, list[_Answer]]:
        """Answers of these drafters, and the question for those behind them."""
        rest = context
        answers = []
        for number in numbers:
            drafter = self.parts[number]
            rooms = rest.copy_lengths if drafter.copies and rest.copy_lengths is not None else rest.max_lengths
            if not any(rooms):
                continue
            draft = drafter.propose(rest)
            if self.is_mixed and not drafter.copies and draft.deterministic:
                # A table's greedy drafts are as certain as copies, but take its time: policies tell the two apart.
                draft = replace(draft, deterministic=False)
            # No drafter follows the last one, so there is no need to wait for a device to know which rows it left out.
            is_last = number + 1 == len(self.parts)
            lengths = rooms if is_last or not draft.width else draft.lengths.tolist()
            takes = tuple(bool(room and length and draft.width) for room, length in zip(rooms, lengths, strict=True))
            if any(takes):
                is_copy = drafter.copies and draft.deterministic and type(draft.law) is PointMass
                answers.append(_Answer(number, draft, takes, is_copy))
            rest = _without(rest, takes)
        return rest, answers

    def copying_part(self) -> Drafter | None:
        """The drafters before the first that samples, as a chain of their own with the same evidence."""
        if self._num_copying in (0, len(self.parts)):
            return super().copying_part()
        return Chain(*self.parts[: self._num_copying])

    def device_draft(self) -> DeviceDrafter | None:
        """That of the first which does not copy, where none is asked behind it: neither a copy nor a drawn draft.

        The host gives rounds their copies, which are judged in another way where drawn drafts may be trees.
        """
        drawing = self.parts[self._num_copying :]
        if not drawing or any(drafter.copies for drafter in drawing) or drawing[0].makes_trees != self.makes_trees:
            return None
        return drawing[0].device_draft() if len(drawing) == 1 or drawing[0].fills_drafts else None

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Every drafter hears of it, those that were not asked too."""
        for drafter in self.parts:
            drafter.rewind(rows, lengths)

    def is_prediction(self, evidence: int) -> bool:
        number, kind = divmod(evidence, CLASSES)
        return self.parts[number].is_prediction(kind)


def _without(context: DraftContext, taken: Sequence[bool]) -> DraftContext:
    """The same question without the rows that have their draft."""

    def left(rooms: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if gone else room for room, gone in zip(rooms, taken, strict=True))

    copies = None if context.copy_lengths is None else left(context.copy_lengths)
    return replace(context, max_lengths=left(context.max_lengths), copy_lengths=copies)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A draft, and the rows that take it."""

    number: int  # of the drafter in the chain
    draft: Draft
    takes: tuple[bool, ...]
    is_copy: bool  # of text, by a drafter that always copies

    def evidence(self, row: int) -> int:
        evidence = self.draft.evidence[row] if self.draft.evidence is not None else 0
        return self.number * CLASSES + min(evidence, CLASSES - 1)


def _shortened(answers: Sequence[_Answer], lengths: Sequence[int]) -> list[_Answer]:
    """Deterministic drafts cut to `lengths`; a row of length 0 does not take its draft."""
    kept = []
    for answer in answers:
        takes = tuple(taken and length > 0 for taken, length in zip(answer.takes, lengths, strict=True))
        most = torch.tensor(lengths, device=answer.draft.lengths.device)
        draft = replace(answer.draft, lengths=answer.draft.lengths.minimum(most))
        if any(takes):
            kept.append(replace(answer, draft=draft, takes=takes))
    return kept


def _combine(answers: Sequence[_Answer], context: DraftContext) -> Draft:
    """One draft in which every row is the one it took; rows no one spoke for have length 0."""
    count, device = len(context.rows), context.device
    width = max((answer.draft.width for answer in answers), default=0)
    tokens = torch.zeros(count, width, dtype=torch.int64, device=device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    choice = torch.zeros(count, dtype=torch.int64, device=device)
    evidence = [0] * count
    for i, answer in enumerate(answers):
        takes = torch.tensor(answer.takes, device=device)
        tokens = torch.where(takes.unsqueeze(1), _widen(answer.draft.tokens, width), tokens)
        lengths = torch.where(takes, answer.draft.lengths, lengths)
        choice = torch.where(takes, i, choice)
        evidence = [answer.evidence(b) if taken else evidence[b] for b, taken in enumerate(answer.takes)]
    return Draft(
        tokens=tokens,
        lengths=lengths,
        law=_law(answers, choice, tokens, context.vocab_size),
        deterministic=all(answer.draft.deterministic for answer in answers),
        cuttable=_cuttable(answers, count),
        evidence=tuple(evidence),
    )


def _tree(answers: Sequence[_Answer], draft: Draft) -> TreeShape | None:
    """Where drafts may be trees, chains are trees without branches.

    A copy is a set of one guess, kept where the target's own draw is that guess: a recorded round then needs no law of
    copies beside that of trees. It is judged so in rounds without a tree, too. Drawn chains are judged by recursive
    rejection: of a single guess it is the token rule, with the same numbers. Which drafts a row has beside it changes
    nothing of what it says.
    """
    count, width, device = len(draft.lengths), draft.width, draft.tokens.device
    if not any(answer.is_copy or answer.draft.tree is not None for answer in answers):
        return None
    parents = torch.arange(-1, width - 1, device=device).expand(count, -1)
    ways = [Siblings.TOP] * count
    for answer in answers:
        tree = answer.draft.tree
        if tree is not None:
            takes = torch.tensor(answer.takes, device=device)
            parents = torch.where(takes.unsqueeze(1), _widen(tree.parents, width), parents)
        kinds = tree.ways if tree is not None else (Siblings.TOP if answer.is_copy else Siblings.SAMPLED,) * count
        ways = [kinds[b] if taken else ways[b] for b, taken in enumerate(answer.takes)]
    are_chains = all(answer.draft.tree is None for answer in answers)
    return TreeShape(parents, tuple(ways), width, 1) if are_chains else TreeShape(parents, tuple(ways))


def _cuttable(answers: Sequence[_Answer], count: int) -> tuple[bool, ...] | None:
    if len({answer.draft.deterministic for answer in answers}) < 2:
        return None
    return tuple(any(a.takes[b] and a.draft.deterministic for a in answers) for b in range(count))


def _law(answers: Sequence[_Answer], choice: Tensor, tokens: Tensor, vocab_size: int) -> Law:
    if all(type(answer.draft.law) is PointMass for answer in answers):
        return PointMass(tokens, vocab_size)
    if len(answers) == 1:
        return answers[0].draft.law
    return MixedLaw(choice, tuple(NarrowLaw(answer.draft.law, answer.draft.width) for answer in answers))


def _widen(positions: Tensor, width: int, value: float = 0.0) -> Tensor:
    """[B, K] -> [B, width], `value` where there was nothing."""
    return torch.nn.functional.pad(positions, (0, width - positions.shape[1]), value=value)


@dataclass(frozen=True, slots=True)
class NarrowLaw:
    """A law of `width` positions beside wider ones; no row that follows it is asked about more."""

    law: Law
    width: int

    def of(self, tokens: Tensor) -> Tensor:
        return _widen(self.law.of(tokens[:, : self.width]), tokens.shape[1])

    def at(self, position: Tensor) -> Tensor:
        return self.law.at(position.clamp(max=self.width - 1))

    def logits_of(self, tokens: Tensor) -> Tensor:
        return _widen(logits_of(self.law, tokens[:, : self.width]), tokens.shape[1], -torch.inf)

    def logits_at(self, position: Tensor) -> Tensor:
        return logits_at(self.law, position.clamp(max=self.width - 1))
