"""Drafters and policies in as few methods as they need: everything else has a default, and plain objects are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forerun.drafters import Chain, PromptLookup, TopK
from forerun.drafters.base import Drafter, as_drafter, empty_draft, shares_rows
from forerun.engine import Engine, Request
from forerun.errors import InvalidArgument
from forerun.math.laws import PointMass
from forerun.models.scorer import Scorer
from forerun.policy import Constant, Policy
from forerun.types import BatchView, Draft, DraftContext
from support.finish import finished
from support.tiny import plain_greedy, tiny_model

PROMPT = (3, 14, 15, 9, 2, 6)


class Two:
    """The two methods that make a drafter: it repeats the row's last token."""

    def propose(self, context: DraftContext) -> Draft:
        lengths = torch.tensor(context.max_lengths)
        last = torch.tensor([history[-1] for history in context.histories])
        tokens = last.unsqueeze(1).repeat(1, int(lengths.max()))
        return Draft(tokens, lengths, PointMass(tokens, context.vocab_size), deterministic=True)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


class Derived(Two, Drafter):
    """The same as a subclass."""


class Rows(Two):
    """A plain object with some of the optional methods."""

    copies = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.calls.append("admit")

    def release(self, row: int) -> None:
        self.calls.append("release")

    def num_draws(self, longest: int) -> int:
        return 2 * longest


class OneLength(Policy):
    """The one method that makes a policy."""

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(2, room) for room in view.max_lengths)


def decoded(drafter: Any, policy: Any) -> tuple[Engine, list[int]]:
    engine = Engine(Scorer(tiny_model("llama")), drafter, policy, strict=True)
    engine.add(Request(prompt=PROMPT, max_new_tokens=12))
    (result,) = finished(engine)
    assert result.stats.num_draft_tokens > 0
    return engine, list(result.tokens)


@pytest.mark.parametrize("kind", (Two, Derived, Rows))
def test_greedy_text_is_the_targets(kind: Any) -> None:
    drafter, policy = kind(), OneLength()
    engine, tokens = decoded(drafter, policy)
    assert tokens == plain_greedy(tiny_model("llama"), list(PROMPT), 12)
    assert engine.drafter is drafter and engine.policy is policy, "as they were given"


def test_a_subclass_has_a_default_for_everything_else() -> None:
    drafter = Derived()
    assert as_drafter(drafter) is drafter.clone() is drafter
    assert not (drafter.copies or drafter.is_mixed or drafter.makes_trees or drafter.has_changed())
    assert drafter.num_draws(3) == 3 and not shares_rows(drafter)


def test_a_plain_objects_optional_methods_are_used() -> None:
    plain = Rows()
    drafter = as_drafter(plain)
    assert drafter.copies and drafter.num_draws(3) == 6 and shares_rows(drafter) and drafter.unwrapped is plain
    decoded(plain, Constant(2))
    assert plain.calls == ["admit", "release"]


class Everything(Rows):
    """A plain object with all that an engine may ask."""

    is_mixed = needs_clock = takes_predictions = reads_targets_keys = True
    drawn_evidence, draft_models, caches = 7, (torch.nn.Linear(1, 1),), ("a cache",)

    def predict(self, row: int, prediction: Sequence[int], start: int) -> None:
        self.calls.append(f"predict {row} {list(prediction)} {start}")

    def is_prediction(self, evidence: int) -> bool:
        return evidence == 3

    def prepare(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        self.calls.append(f"prepare {list(rows)}")

    def num_unread(self, row: int, length: int) -> int:
        return length - row


def test_a_plain_object_is_asked_what_a_subclass_is() -> None:
    plain = Everything()
    drafter, default = as_drafter(plain), as_drafter(Two())
    assert drafter.needs_clock and drafter.takes_predictions and drafter.reads_targets_keys and drafter.is_mixed
    assert drafter.drawn_evidence == 7 and drafter.caches == plain.caches and drafter.draft_models == plain.draft_models
    assert drafter.is_prediction(3) and not drafter.is_prediction(2) and drafter.num_unread(2, 9) == 7
    drafter.predict(1, (4, 5), 6)
    drafter.prepare([1, 2], [[3], [4]])
    assert plain.calls == ["predict 1 [4, 5] 6", "prepare [1, 2]"]
    assert not (default.needs_clock or default.takes_predictions or default.reads_targets_keys or default.caches)
    assert not (default.drawn_evidence or default.draft_models or default.is_prediction(0) or default.num_unread(0, 9))


def test_combinations_take_plain_objects() -> None:
    assert Chain(Rows(), Two()).is_mixed and not Chain(PromptLookup(), Rows()).is_mixed
    assert TopK(Rows(), 3).copies and TopK(Rows(), 3).num_draws(2) == 4


def test_without_the_two_methods_it_is_no_drafter() -> None:
    with pytest.raises(InvalidArgument, match="propose and rewind"):
        Engine(Scorer(tiny_model("llama")), object(), Constant(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rewind"):
        type("Half", (Drafter,), {"propose": Two.propose})()


def test_an_empty_draft_is_a_round_without_one() -> None:
    draft = empty_draft(3, 97, torch.device("cpu"))
    assert draft.width == 0 and draft.lengths.tolist() == [0, 0, 0] and draft.deterministic


def test_what_is_around_a_drafter_says_of_it_what_a_policy_asks() -> None:
    inner = Chain(PromptLookup(), Derived())
    inner.needs_clock = True
    around = TopK(inner, 5)
    assert inner.drawn_evidence and around.drawn_evidence == around.clone().drawn_evidence == inner.drawn_evidence
    assert around.needs_clock and around.clone().needs_clock and not TopK(Derived(), 5).needs_clock
