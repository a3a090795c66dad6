"""What a drafter is: two methods that it must have, and defaults for everything else an engine may ask of it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from forerun.arguments import methods
from forerun.math.laws import PointMass
from forerun.types import Draft, DraftContext, Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forerun.cache.base import KeyValueCache
    from forerun.drafters.device import DeviceDrafter
    from forerun.models.scorer import Scorer


class Drafter(ABC):
    """Whatever proposes tokens. A subclass needs `propose` and `rewind`; the other methods have defaults.

    One that keeps state per row overrides `admit` and `release`, and `clone`: every engine works with a clone, so that
    one drafter may be given to several engines. Without an own `clone` they all share the very same object.
    """

    copies = False
    """Every draft is deterministic, a function of the row's history alone."""
    is_mixed = False
    """Some drafts are deterministic and others are sampled: a policy treats the two differently."""
    makes_trees = False
    """Drafts may be trees; `max_lengths` then bounds their depth."""
    fills_drafts = False
    """Drafts are as long as `max_lengths` allow, whatever the text: nobody is asked behind it."""
    drawn_evidence = 0
    """The evidence class of drafts that are sampled, where others are deterministic."""
    needs_clock = False
    """Nobody asked for its drawn drafts, and a step of it is dear: policies without a clock ask for copies alone."""
    takes_predictions = False
    """Whether `predict` is of use to it: a request that predicts its text is refused by others."""
    parts: tuple[Drafter, ...] = ()
    """The drafters it drafts with, where it combines others. What it is told, by default they are told, too."""

    @property
    def unwrapped(self) -> Any:
        """The object itself; of one that stands in for a user's plain object, that object."""
        return self

    @abstractmethod
    def propose(self, context: DraftContext) -> Draft:
        """Guess up to `context.max_lengths[b]` tokens for each row."""

    @abstractmethod
    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Only the first `lengths[i]` tokens of row `rows[i]` still stand; forget any state built on later ones."""

    def clone(self) -> Self:
        """One that drafts alike and shares the weights, but knows neither rows nor a target."""
        return self

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Called by the engine before any row, and again after the target's model was changed."""
        for part in self.parts:
            part.bind(target, tokenizer)

    def has_changed(self) -> bool:
        """Whether a model it drafts with was changed since `bind`."""
        return any(part.has_changed() for part in self.parts)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Row number `row` holds a new text from now on."""
        for part in self.parts:
            part.admit(row, prompt)

    def read(self, row: int, source: Source) -> None:
        """Follows `admit` behind an encoder-decoder target: what its encoder reads for the row."""
        for part in self.parts:
            part.read(row, source)

    def predict(self, row: int, prediction: Sequence[int], start: int) -> None:
        """Follows `admit`: what the request expects behind the first `start` tokens of the row; often nothing."""
        for part in self.parts:
            part.predict(row, prediction, start)

    def is_prediction(self, evidence: int) -> bool:
        """Whether drafts of this evidence class are copied from what a request predicts."""
        return False

    def release(self, row: int) -> None:
        """The row has left."""
        for part in self.parts:
            part.release(row)

    @property
    def caches(self) -> tuple[KeyValueCache, ...]:
        """Where it keeps keys of its own: no more rows run than fit there."""
        return tuple(cache for part in self.parts for cache in part.caches)

    @property
    def reads_targets_keys(self) -> bool:
        """Whether it drafts behind keys that the target has made: a prompt is then the target's to read first."""
        return any(part.reads_targets_keys for part in self.parts)

    @property
    def split_models(self) -> tuple[PreTrainedModel, ...]:
        """Models it drafts with whose weights are split over processes: all of those have to run its passes."""
        return tuple(model for part in self.parts for model in part.split_models)

    @property
    def draft_models(self) -> tuple[nn.Module, ...]:
        """Models it drafts with: they are in evaluation mode while rows are in flight, as the target is."""
        return tuple(model for part in self.parts for model in part.draft_models)

    def copying_part(self) -> Drafter | None:
        """What drafts deterministically before anything is sampled: all of it, a part, or nothing."""
        return self if self.copies else None

    def prepare(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        """Of one with a copying part: called while the device works on a round, with the rows' texts before that round.

        What is done here is not waited for; `propose` follows with the same texts or longer ones.
        """
        for part in self.parts:
            part.prepare(rows, histories)

    def num_draws(self, longest: int) -> int:
        """Uniforms a row needs in a round whose longest draft has `longest` tokens."""
        return longest

    def num_unread(self, row: int, length: int) -> int:
        """Tokens of a row of `length` tokens that it would have to take in before it could draw a draft."""
        return sum(part.num_unread(row, length) for part in self.parts)

    def device_draft(self) -> DeviceDrafter | None:
        """How it drafts inside rounds that a GPU runs by itself; None: on the host. Asked once it is bound."""
        return None


class DrafterAround(Drafter):
    """A drafter that changes how another, `inner`, proposes and passes everything else on to it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner = as_drafter(inner)
        self.parts = (inner,)
        self.copies, self.is_mixed, self.makes_trees = inner.copies, inner.is_mixed, inner.makes_trees
        self.takes_predictions = inner.takes_predictions
        self.drawn_evidence, self.needs_clock = inner.drawn_evidence, inner.needs_clock

    def clone(self) -> Self:
        twin = copy.copy(self)
        twin.inner = self.inner.clone()
        twin.parts = (twin.inner,)
        return twin

    def propose(self, context: DraftContext) -> Draft:
        return self.inner.propose(context)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.inner.rewind(rows, lengths)

    def is_prediction(self, evidence: int) -> bool:
        return self.inner.is_prediction(evidence)

    def num_draws(self, longest: int) -> int:
        return self.inner.num_draws(longest)


class PlainDrafter(Drafter):
    """A user's object with `propose` and `rewind` that does not derive from `Drafter`.

    The optional methods and attributes of `Drafter` are used where the object has them, except those that are about
    its parts or split models or put it into recorded rounds: `parts`, `split_models`, `copying_part`, `device_draft`.
    """

    OPTIONAL = (
        "copies", "makes_trees", "takes_predictions", "drawn_evidence", "needs_clock", "bind", "has_changed", "admit",
        "read", "predict", "is_prediction", "release", "prepare", "num_draws", "num_unread",
    )  # fmt: skip

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        for name in self.OPTIONAL:
            if hasattr(plain, name):
                setattr(self, name, getattr(plain, name))

    @property
    def unwrapped(self) -> Any:
        return self.plain

    @property
    def is_mixed(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.plain, "is_mixed", False))

    @property
    def caches(self) -> tuple[KeyValueCache, ...]:
        return tuple(getattr(self.plain, "caches", ()))

    @property
    def reads_targets_keys(self) -> bool:
        return bool(getattr(self.plain, "reads_targets_keys", False))

    @property
    def draft_models(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self.plain, "draft_models", ()))

    def propose(self, context: DraftContext) -> Draft:
        draft: Draft = self.plain.propose(context)
        return draft

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.plain.rewind(rows, lengths)

    def clone(self) -> Self:
        """By the object's class alone: one that passes every unknown name on would give its inner one's clone."""
        return type(self)(self.plain.clone()) if hasattr(type(self.plain), "clone") else self


def as_drafter(value: Any) -> Drafter:
    """A drafter as it is; any other object with `propose` and `rewind` as one."""
    if isinstance(value, Drafter):
        return value
    remedy = "must be a Drafter, or an object with the methods propose and rewind"
    return PlainDrafter(methods("drafter", value, ("propose", "rewind"), remedy))


def shares_rows(drafter: Drafter) -> bool:
    """Whether it keeps state per row and has no clone of its own: two engines would mix up their rows in it."""
    if isinstance(drafter, PlainDrafter):
        return hasattr(drafter.plain, "admit") and not hasattr(type(drafter.plain), "clone")
    return type(drafter).admit is not Drafter.admit and type(drafter).clone is Drafter.clone


def copied_draft(copies: Sequence[tuple[list[int], int]], context: DraftContext) -> Draft:
    """A deterministic draft of each row's tokens, with the evidence behind them."""
    lengths = [len(tokens) for tokens, _ in copies]
    width = max(lengths, default=0)
    padded = [tokens + [0] * (width - len(tokens)) for tokens, _ in copies]
    tokens = torch.tensor(padded, dtype=torch.int64, device=context.device).view(len(copies), width)
    return Draft(
        tokens=tokens,
        lengths=torch.tensor(lengths, dtype=torch.int64, device=context.device),
        law=PointMass(tokens, context.vocab_size),
        deterministic=True,
        evidence=tuple(evidence for _, evidence in copies),
    )


def empty_draft(num_rows: int, vocab_size: int, device: torch.device) -> Draft:
    """A draft of no token: a round with it is plain decoding."""
    tokens = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
    return Draft(tokens, lengths, PointMass(tokens, vocab_size), deterministic=True)
