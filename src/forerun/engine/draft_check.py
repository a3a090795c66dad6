"""Whether a drafter's answer is a valid draft. One that passes here cannot make a round fail.

Shapes and types of all drafts are looked at, which costs microseconds; laws only where the drafter is a user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.drafters.chain import NarrowLaw
from forerun.engine.branching import check_tree
from forerun.errors import InvalidArgument
from forerun.math.laws import LogitLaw, MixedLaw, PointMass, ReducedLaw, SparseLaw, TableLaw
from forerun.models.scorer import Scorer
from forerun.rules import AnyRule
from forerun.types import Draft, DraftContext, Law, Rule, Siblings

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
AGREEMENT = 0.05  # of a probability, by which two ways to ask for it may differ: bfloat16 through a logarithm and back
SLACK = 1e-3  # by which the mass of a law may exceed 1: sums of many rounded numbers
LACK = 0.01  # by which it may fall short: bfloat16 rounds each of them by up to 0.4 %


def is_ours(drafter: Drafter) -> bool:
    """Whether a drafter, and whatever it drafts with, comes with Forerun: its laws are then what they should be."""
    return type(drafter.unwrapped).__module__.startswith("forerun.") and all(map(is_ours, drafter.parts))


def checked(draft: Draft, context: DraftContext, rule: AnyRule, target: Scorer, trusted: bool = False) -> Draft:
    """The draft as the loop wants it; raises where it is none. The laws of a `trusted` drafter are not looked at."""
    if not isinstance(draft, Draft):
        raise InvalidArgument(f"propose returned {type(draft).__name__!r} instead of a Draft")
    count = len(context.rows)
    tokens = _whole(draft.tokens, "tokens", 2, context)
    lengths = _whole(draft.lengths, "lengths", 1, context)
    if len(tokens) != count or len(lengths) != count:
        raise InvalidArgument(f"draft of shape {tuple(tokens.shape)} for {count} rows")
    _check_remarks(draft, count)
    if tokens is not draft.tokens or lengths is not draft.lengths:
        draft = replace(draft, tokens=tokens, lengths=lengths)
    longest = _check_values(draft, context, rule, target)
    if longest < draft.width:  # columns behind the longest draft are not used
        tree = draft.tree and replace(draft.tree, parents=draft.tree.parents[:, :longest])
        draft = replace(draft, tokens=tokens[:, :longest], tree=tree if longest else None)
    return draft if trusted else replace(draft, law=_sound(draft, context.vocab_size))


def _whole(numbers: Tensor, name: str, dims: int, context: DraftContext) -> Tensor:
    """Whole numbers of so many dimensions, as int64, side by side where the target is."""
    if not isinstance(numbers, Tensor) or numbers.dim() != dims or numbers.dtype not in WHOLE:  # int64 comes first
        what = f"{numbers.dtype} {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise InvalidArgument(f"draft.{name} is {what}: give a tensor of int64 with {dims} dimensions")
    if numbers.device.type != context.device.type:
        raise InvalidArgument(f"draft.{name} is on {numbers.device}: put it on context.device, {context.device}")
    return numbers.long().contiguous()


def _check_remarks(draft: Draft, count: int) -> None:
    """What is said of the draft's rows beside tokens and laws."""
    if draft.evidence is not None and not _each(draft.evidence, count, int):
        raise InvalidArgument(f"draft.evidence={draft.evidence!r}: give one integer a row, or None")
    if draft.cuttable is not None and not _each(draft.cuttable, count, bool):
        raise InvalidArgument(f"draft.cuttable={draft.cuttable!r}: give True or False a row, or None")


def _each(values: object, count: int, kind: type) -> bool:
    return isinstance(values, tuple) and len(values) == count and all(isinstance(value, kind) for value in values)


def _check_values(draft: Draft, context: DraftContext, rule: AnyRule, target: Scorer) -> int:
    """Lengths within the room that was given, tokens that the target knows, a tree that is one; the longest length."""
    tokens, lengths = draft.tokens.tolist(), draft.lengths.tolist()
    copies = context.copy_lengths or context.max_lengths
    rooms = [max(pair) for pair in zip(context.max_lengths, copies, strict=True)]
    if draft.tree is not None:
        if rule is not Rule.TOKEN:
            raise InvalidArgument("a tree is judged by the token rule; decode with rule='token' or without a tree")
        target.check_trees()
        check_tree(draft, tokens, lengths, rooms)
        rooms = [draft.width] * len(rooms)  # of its depth there is a bound, of its size there is none
    for row, length, most in zip(tokens, lengths, rooms, strict=True):
        if not 0 <= length <= min(most, len(row)):
            raise InvalidArgument(f"draft of length {length} where at most {min(most, len(row))} was asked for")
        if length and (min(row[:length]) < 0 or max(row[:length]) >= context.vocab_size):
            raise InvalidArgument(f"drafted token outside the target's vocabulary of {context.vocab_size}")
    return max(lengths, default=0)


def _sound(draft: Draft, vocab_size: int) -> Law:
    """The draft's law, if it can be asked anything a rule may ask.

    A law of a class that is not Forerun's is read whole before anything is decided. If it failed in the middle of a
    round, whether it does could depend on what the round had decided, and going on without it would bend the law.
    """
    law = draft.law
    if not draft.width:
        return PointMass(draft.tokens, vocab_size)
    if not _is_known(law):
        law = _read_whole(law, draft, vocab_size)
    rows, width = draft.tokens.shape
    if (reason := _why_not(law, rows, width, vocab_size, draft.lengths)) is not None:
        raise InvalidArgument(f"draft.law, a {type(law).__name__}, {reason}")
    is_heeded = draft.tree is None or Siblings.TOP not in draft.tree.ways  # a set of guesses is judged without its law
    if is_heeded and _denies(law, draft.tokens, draft.lengths):
        raise InvalidArgument(
            f"draft.law, a {type(law).__name__}, gives a drafted token no chance: give the law it was drawn from"
        )
    return law


def _is_known(law: Any) -> bool:
    """Whether it is made of Forerun's own laws alone. Classes derived from these may do anything."""
    kind = type(law)
    if kind is MixedLaw:
        return all(map(_is_known, law.laws))
    if kind in (ReducedLaw, NarrowLaw):
        return _is_known(law.law)
    return kind in (PointMass, SparseLaw, LogitLaw)


def _why_not(law: Law, rows: int, width: int, vocab_size: int, lengths: Tensor) -> str | None:
    """What is wrong with it, in words: beginnings of the shapes [rows, width, ..] that it should have, and values."""
    if isinstance(law, MixedLaw):
        chosen = law.choice
        if chosen.shape != (rows,) or not bool(((chosen >= 0) & (chosen < len(law.laws))).all()):
            return f"does not choose one of its {len(law.laws)} laws for each of {rows} rows"
        # Nobody asks a part about the rows of the others.
        part_lengths = [lengths * (chosen == number) for number in range(len(law.laws))]
        reasons = [_why_not(part, rows, width, vocab_size, part_lengths[i]) for i, part in enumerate(law.laws)]
        return next((reason for reason in reasons if reason is not None), None)
    if isinstance(law, NarrowLaw):
        if int(lengths.max()) > law.width:
            return f"is of {law.width} positions for a draft of {int(lengths.max())}"
        return _why_not(law.law, rows, min(width, law.width), vocab_size, lengths)
    if isinstance(law, PointMass):
        return _shape(law.tokens, rows, width) or _vocabulary(law, vocab_size)
    if isinstance(law, SparseLaw):
        if law.ids.shape != law.probs.shape or law.ids.dtype != torch.int64:
            return f"has ids {law.ids.dtype} {tuple(law.ids.shape)} and probabilities {tuple(law.probs.shape)}"
        strange = ((law.ids < 0) | (law.ids >= vocab_size)) & (law.probs != 0)  # padding carries 0
        known = law.probs.masked_fill(strange, -1.0)
        return _shape(law.probs, rows, width) or _vocabulary(law, vocab_size) or _values(known[:, :width], lengths)
    if isinstance(law, TableLaw):
        return _values(law.probs, lengths)
    if isinstance(law, LogitLaw):
        return _shape(law.index, rows, width) or _vocabulary(law, vocab_size) or _owners(law, rows)
    if isinstance(law, ReducedLaw):
        if (reason := _ids(law.ids, vocab_size) or _vocabulary(law, vocab_size)) is not None:
            return reason
        return _why_not(law.law, rows, width, len(law.ids), lengths)
    return None


def _shape(held: Tensor, rows: int, width: int) -> str | None:
    wrong = held.dim() < 2 or held.shape[0] != rows or held.shape[1] < width
    return f"has shape {tuple(held.shape)} for a draft of shape {(rows, width)}" if wrong else None


def _ids(ids: Tensor, vocab_size: int) -> str | None:
    """Of a part of the vocabulary."""
    good = ids.dim() == 1 and ids.dtype == torch.int64 and len(ids) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    is_ascending = good and bool((ids[1:] > ids[:-1]).all())
    return None if is_ascending else f"does not name ids of the target's {vocab_size}, ascending, in int64"


def _vocabulary(law: PointMass | SparseLaw | LogitLaw | ReducedLaw, vocab_size: int) -> str | None:
    return None if law.vocab_size == vocab_size else f"is over {law.vocab_size} tokens, the target's are {vocab_size}"


def _values(probs: Tensor, lengths: Tensor) -> str | None:
    """Of [B, K, S], where something was drafted."""
    real = torch.arange(probs.shape[1], device=probs.device) < lengths.unsqueeze(-1)
    mass = probs.sum(dim=-1)
    good = (probs >= 0).all(dim=-1) & (mass <= 1 + SLACK) & (mass >= 1 - LACK)
    return None if bool((good | ~real).all()) else "has probabilities below 0, not 1 together, or of no token"


def _denies(law: Law, tokens: Tensor, lengths: Tensor) -> bool:
    """Whether it says of a drafted token that it is never drafted. Such a token would be kept wherever the target may
    say it. What a law of logits makes of a token is known once they are all read, which is the rule's to do."""
    if isinstance(law, MixedLaw):
        return any(_denies(part, tokens, lengths * (law.choice == number)) for number, part in enumerate(law.laws))
    if isinstance(law, NarrowLaw):
        return _denies(law.law, tokens[:, : law.width], lengths)
    if not isinstance(law, PointMass | SparseLaw | TableLaw):
        return False
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(-1)
    return bool(((law.of(tokens) <= 0) & real).any())


def _owners(law: LogitLaw, rows: int) -> str | None:
    owner = law.owner
    if len(law.params.temperature) != rows or owner.shape != law.logits.shape[:1]:
        return (
            f"has {len(owner)} owners of {len(law.logits)} rows of logits, parameters of {len(law.params.temperature)}"
        )
    wrong = len(owner) and not bool(((owner >= 0) & (owner < rows)).all())
    return f"names owners outside of the {rows} rows" if wrong else None


def _read_whole(law: Law, draft: Draft, vocab_size: int) -> TableLaw:
    """What a law says at every position of the draft."""
    wanted = (len(draft.lengths), vocab_size)
    positions = [torch.full_like(draft.lengths, i) for i in range(draft.width)]
    probs = _stacked([law.at(position) for position in positions], wanted, draft)
    table = TableLaw(probs)
    if draft.tree is None:  # a tree is judged by whole laws alone
        _check_agreement(law.of(draft.tokens), table.of(draft.tokens), draft)
    if (logits_at := getattr(law, "logits_at", None)) is None:
        return table
    return TableLaw(probs, _stacked([logits_at(position) for position in positions], wanted, draft))


def _check_agreement(said: Tensor, listed: Tensor, draft: Draft) -> None:
    """Only `at` is heeded from here on, so an `of` that says something else would be ignored in silence."""
    if not isinstance(said, Tensor) or said.shape != listed.shape or not said.is_floating_point():
        what = f"{said.dtype} {tuple(said.shape)}" if isinstance(said, Tensor) else type(said).__name__
        raise InvalidArgument(f"draft.law.of gave {what}: give probabilities of shape {tuple(listed.shape)}")
    said, listed = said.to(listed.device).double(), listed.double()
    real = torch.arange(draft.width, device=listed.device) < draft.lengths.unsqueeze(-1)
    apart = ~torch.isclose(said, listed, rtol=AGREEMENT, atol=0.0, equal_nan=True) & real
    if bool(apart.any()):
        one, other = float(said[apart][0]), float(listed[apart][0])
        raise InvalidArgument(
            f"draft.law.of says {one:.3g} of a drafted token, draft.law.at {other:.3g}: one law, please"
        )


def _stacked(parts: Sequence[Tensor], wanted: tuple[int, int], draft: Draft) -> Tensor:
    """[B, K, V]"""
    for part in parts:
        if not isinstance(part, Tensor) or part.shape != wanted or not part.is_floating_point():
            what = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise InvalidArgument(f"draft.law.at gave {what}: give probabilities of shape {wanted}")
    return torch.stack(list(parts), dim=1).to(draft.tokens.device)
