"""A user's drafter and a user's policy that break their contracts at random, in every way somebody thought of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.math.laws import LogitLaw, PointMass, SparseLaw
from forerun.types import BatchView, Draft, DraftContext, RoundOutcome, Siblings, TreeShape

Change = Callable[["WildDrafter", Draft, DraftContext], Any]


class WildLaw:
    """A law of a user's own, wrong in the given way."""

    def __init__(self, fault: str, tokens: Tensor, vocab: int) -> None:
        self.fault, self.tokens, self.vocab = fault, tokens, vocab

    def of(self, tokens: Tensor) -> Any:
        return self._spoilt(torch.full(tokens.shape, 1 / self.vocab), in_of=True)

    def at(self, position: Tensor) -> Any:
        return self._spoilt(torch.full((len(position), self.vocab), 1 / self.vocab), in_of=False)

    def _spoilt(self, q: Tensor, in_of: bool) -> Any:
        faults: dict[str, Callable[[], Any]] = {
            "uniform": lambda: q,
            "raises": lambda: 1 // 0,
            "of raises": lambda: 1 // 0 if in_of else q,
            "at raises": lambda: q if in_of else 1 // 0,
            "shape": lambda: q[:, :-1],
            "rows": lambda: q[:-1],
            "list": lambda: q.tolist(),
            "none": lambda: None,
            "whole": lambda: q.long(),
            "negative": lambda: -q,
            "some negative": lambda: torch.where(torch.arange(q.shape[1]) % 2 == 0, -3.0, q),
            "nan": lambda: torch.full_like(q, torch.nan),
            "infinite": lambda: torch.full_like(q, torch.inf),
            "huge": lambda: q + 5,
            "zero": lambda: torch.zeros_like(q),
            "complex": lambda: q.to(torch.complex64),
        }
        return faults[self.fault]()


LAW_FAULTS = (
    "uniform", "raises", "of raises", "at raises", "shape", "rows", "list", "none", "whole", "negative",
    "some negative", "nan", "infinite", "huge", "zero", "complex",
)  # fmt: skip


def _tree(draft: Draft, parents: Any, ways: Any) -> Draft:
    return replace(draft, tree=TreeShape(parents, ways))


def _chain_parents(draft: Draft) -> Tensor:
    return torch.arange(-1, draft.width - 1).repeat(len(draft.lengths), 1)


def _star(me: WildDrafter, draft: Draft, context: DraftContext) -> Draft:
    """Different guesses for the next token side by side: a tree of depth 1, as far as there is room for one."""
    width = min(3, context.vocab_size)
    tokens = torch.stack([torch.tensor(me.rng.sample(range(context.vocab_size), width)) for _ in context.rows])
    tokens[:, 0] = draft.tokens[:, 0]
    for row in tokens:
        row[1:] = torch.tensor([t for t in range(context.vocab_size) if t != int(row[0])][: width - 1])
    room = torch.tensor(context.max_lengths)
    lengths = torch.where(room > 0, width, 0)
    way = me.rng.choice((Siblings.TOP, Siblings.SAMPLED))
    law = me.rng.choice((PointMass(tokens, context.vocab_size), WildLaw(me.pick(LAW_FAULTS), tokens, me.vocab)))
    shape = TreeShape(torch.full(tokens.shape, -1), (way,) * len(room))
    return Draft(tokens, lengths, law, tree=shape)


def _sparse(me: WildDrafter, draft: Draft, context: DraftContext, *, scale: float, wrong: str = "") -> Draft:
    ids = torch.stack([draft.tokens, (draft.tokens + 1) % context.vocab_size], dim=-1)
    probs = torch.full(ids.shape, 0.5 * scale, dtype=torch.float64)
    if wrong == "narrow":
        ids, probs = ids[:, :-1], probs[:, :-1]
    elif wrong == "ids":
        ids = ids + 1000
    elif wrong == "float ids":
        ids = ids.double()
    return replace(draft, law=SparseLaw(ids, probs, context.vocab_size))


def _logits(me: WildDrafter, draft: Draft, context: DraftContext, *, wrong: str) -> Draft:
    rows, width = draft.tokens.shape
    logits = torch.randn(rows, width, context.vocab_size)
    law = LogitLaw.dense(logits, context.params)
    owner, index = torch.arange(rows * width) // max(width, 1), torch.arange(rows * width).reshape(rows, width)
    if wrong == "owner":
        law = LogitLaw(logits.flatten(0, 1), index, context.params, owner + 7)
    elif wrong == "index":
        law = LogitLaw(logits.flatten(0, 1), index[:, :0], context.params, owner)
    elif wrong == "nan":
        law = LogitLaw.dense(logits * torch.nan, context.params)
    elif wrong == "vocabulary":
        law = LogitLaw.dense(logits[..., :-3], context.params)
    return replace(draft, law=law)


def _own_law(fault: str, me: WildDrafter, draft: Draft, context: DraftContext) -> Draft:
    return replace(draft, law=WildLaw(fault, draft.tokens, context.vocab_size))


def _raise(*_: Any) -> Draft:
    raise RuntimeError("no idea")


CHANGES: dict[str, Change] = {
    "none": lambda me, d, c: d,
    "right": lambda me, d, c: d,
    "raises": _raise,
    "nothing": lambda me, d, c: None,
    "a tuple": lambda me, d, c: (d.tokens, d.lengths),
    "lists": lambda me, d, c: replace(d, tokens=d.tokens.tolist()),
    "list of lengths": lambda me, d, c: replace(d, lengths=d.lengths.tolist()),
    "one row more": lambda me, d, c: replace(d, tokens=torch.cat([d.tokens, d.tokens[:1]])),
    "one row less": lambda me, d, c: replace(d, tokens=d.tokens[:-1]),
    "flat": lambda me, d, c: replace(d, tokens=d.tokens.flatten()),
    "deep": lambda me, d, c: replace(d, tokens=d.tokens[..., None]),
    "lengths twice": lambda me, d, c: replace(d, lengths=torch.cat([d.lengths, d.lengths])),
    "lengths deep": lambda me, d, c: replace(d, lengths=d.lengths[:, None]),
    "turned round": lambda me, d, c: replace(d, tokens=d.tokens.T.contiguous().T),
    "every other length": lambda me, d, c: replace(d, lengths=d.lengths.repeat_interleave(2)[::2]),
    "int32": lambda me, d, c: replace(d, tokens=d.tokens.int()),
    "int32 and its law": lambda me, d, c: replace(d, tokens=d.tokens.int(), law=PointMass(d.tokens.int(), me.vocab)),
    "int32 lengths": lambda me, d, c: replace(d, lengths=d.lengths.int()),
    "bool": lambda me, d, c: replace(d, tokens=d.tokens.bool()),
    "bool lengths": lambda me, d, c: replace(d, lengths=d.lengths.bool()),
    "float": lambda me, d, c: replace(d, tokens=d.tokens.float()),
    "float and its law": lambda me, d, c: replace(d, tokens=d.tokens.double(), law=PointMass(d.tokens.double(), 9)),
    "float lengths": lambda me, d, c: replace(d, lengths=d.lengths.float()),
    "too wide": lambda me, d, c: replace(d, tokens=torch.cat([d.tokens, d.tokens + me.vocab, d.tokens - 99], dim=1)),
    "too long": lambda me, d, c: replace(d, tokens=d.tokens.repeat(1, 9), lengths=d.lengths * 9),
    "longer than wide": lambda me, d, c: replace(d, lengths=d.lengths + 3),
    "negative lengths": lambda me, d, c: replace(d, lengths=-d.lengths - 1),
    "beyond the vocabulary": lambda me, d, c: replace(d, tokens=d.tokens + me.vocab),
    "negative tokens": lambda me, d, c: replace(d, tokens=-d.tokens - 1),
    "law missing": lambda me, d, c: replace(d, law=None),  # type: ignore[arg-type]
    "law of other tokens": lambda me, d, c: replace(d, law=PointMass(d.tokens * 0, me.vocab)),
    "law too narrow": lambda me, d, c: replace(d, law=PointMass(d.tokens[:, :-1], me.vocab)),
    "law of one row": lambda me, d, c: replace(d, law=PointMass(d.tokens[:1], me.vocab)),
    "law of few tokens": lambda me, d, c: replace(d, law=PointMass(d.tokens, 3)),
    "sparse": lambda me, d, c: _sparse(me, d, c, scale=1),
    "sparse, half": lambda me, d, c: _sparse(me, d, c, scale=0.5),
    "sparse, negative": lambda me, d, c: _sparse(me, d, c, scale=-1),
    "sparse, huge": lambda me, d, c: _sparse(me, d, c, scale=1e30),
    "sparse, narrow": lambda me, d, c: _sparse(me, d, c, scale=1, wrong="narrow"),
    "sparse, ids": lambda me, d, c: _sparse(me, d, c, scale=1, wrong="ids"),
    "sparse, float ids": lambda me, d, c: _sparse(me, d, c, scale=1, wrong="float ids"),
    "logits": lambda me, d, c: _logits(me, d, c, wrong=""),
    "logits, owner": lambda me, d, c: _logits(me, d, c, wrong="owner"),
    "logits, index": lambda me, d, c: _logits(me, d, c, wrong="index"),
    "logits, nan": lambda me, d, c: _logits(me, d, c, wrong="nan"),
    "logits, vocabulary": lambda me, d, c: _logits(me, d, c, wrong="vocabulary"),
    "tree that is a chain": lambda me, d, c: _tree(d, _chain_parents(d), (Siblings.TOP,) * len(c.rows)),
    "tree": _star,
    "tree of later parents": lambda me, d, c: _tree(d, _chain_parents(d) + 2, (Siblings.TOP,) * len(c.rows)),
    "tree of far parents": lambda me, d, c: _tree(d, _chain_parents(d) - 9, (Siblings.TOP,) * len(c.rows)),
    "tree of floats": lambda me, d, c: _tree(d, _chain_parents(d).float(), (Siblings.TOP,) * len(c.rows)),
    "tree of lists": lambda me, d, c: _tree(d, _chain_parents(d).tolist(), (Siblings.TOP,) * len(c.rows)),
    "tree of few ways": lambda me, d, c: _tree(d, _chain_parents(d), (Siblings.TOP,)),
    "tree of odd ways": lambda me, d, c: _tree(d, _chain_parents(d), ("best",) * len(c.rows)),
    "tree of twins": lambda me, d, c: _tree(
        replace(d, tokens=d.tokens * 0), _chain_parents(d) * 0 - 1, (Siblings.TOP,) * len(c.rows)
    ),
    "tree of nobody": lambda me, d, c: replace(d, tree="oak"),  # type: ignore[arg-type]
    "evidence of few": lambda me, d, c: replace(d, evidence=(1,) * (len(c.rows) + 1)),
    "evidence in words": lambda me, d, c: replace(d, evidence="strong"),  # type: ignore[arg-type]
    "cuttable of few": lambda me, d, c: replace(d, cuttable=(True,) * (len(c.rows) + 1)),
    "cuttable in words": lambda me, d, c: replace(d, cuttable="yes"),  # type: ignore[arg-type]
    **{f"law: {fault}": partial(_own_law, fault) for fault in LAW_FAULTS},
}  # fmt: skip


Guess = Callable[[Sequence[int], int], list[int]]  # history, room -> tokens


class WildDrafter:
    """Often knows the answer, as `guess` has it, and breaks its contract in a way that its generator chooses."""

    def __init__(
        self, seed: int, vocab: int, guess: Callable[[Sequence[int], int], list[int]], change: str = ""
    ) -> None:
        self.rng, self.vocab, self.guess, self.change = random.Random(seed), vocab, guess, change

    def pick(self, choices: Sequence[str]) -> str:
        return self.rng.choice(choices)

    def num_draws(self, longest: int) -> Any:
        return self.rng.choice((longest, longest + 2)) if self.change or self.rng.random() < 0.9 else "many"

    def propose(self, context: DraftContext) -> Any:
        width = max(context.max_lengths)
        rows = [self._row(history, width) for history in context.histories]
        tokens = torch.tensor(rows, dtype=torch.long).view(len(rows), width)
        draft = Draft(tokens, torch.tensor(context.max_lengths), PointMass(tokens, context.vocab_size))
        return CHANGES[self.change or self.pick(tuple(CHANGES))](self, draft, context)

    def _row(self, history: Sequence[int], width: int) -> list[int]:
        known = self.guess(history, width)
        tokens = [*known, *[0] * (width - len(known))]
        return [t if self.rng.random() < 0.7 else self.rng.randrange(self.vocab) for t in tokens]

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self._stumble()

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._stumble()

    def release(self, row: int) -> None:
        self._stumble()

    def _stumble(self) -> None:
        if not self.change and self.rng.random() < 0.1:
            raise RuntimeError("what was that?")


class WildPolicy:
    """Answers rubbish half of the time."""

    def __init__(self, seed: int, most: int = 4) -> None:
        self.rng, self.most = random.Random(seed), most

    def lengths(self, view: BatchView) -> Any:
        return self._spoilt(tuple(min(self.most, room) for room in view.max_lengths))

    def trim(self, view: BatchView, draft: Draft) -> Any:
        return self._spoilt(tuple(draft.lengths.tolist()))

    def copy_lengths(self, view: BatchView) -> Any:
        return self._spoilt(tuple(view.max_lengths))

    def observe(self, outcome: RoundOutcome) -> None:
        self._spoilt(())

    def _spoilt(self, lengths: tuple[int, ...]) -> Any:
        if self.rng.random() < 0.5:
            return lengths
        faults: tuple[Callable[[], Any], ...] = (
            lambda: 1 // 0,
            lambda: None,
            lambda: 3,
            lambda: "many",
            lambda: (*lengths, 1),
            lambda: lengths[:-1],
            lambda: tuple(-1 - n for n in lengths),
            lambda: tuple(n + 0.5 for n in lengths),
            lambda: tuple(10**9 for _ in lengths),
            lambda: tuple(True for _ in lengths),
            lambda: list(lengths),
            lambda: torch.tensor(lengths),
        )
        return self.rng.choice(faults)()
