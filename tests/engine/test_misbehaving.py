"""Drafters and policies of a user's own that break their contracts: each fault costs its draft and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forerun
from engine.scripted import VOCAB, answer
from forerun.engine import draft_check
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.laws import PointMass, SparseLaw
from forerun.math.verify import residual
from forerun.policy import Constant
from forerun.types import BatchView, Draft, DraftContext, RoundOutcome
from fuzz.misbehaving import CHANGES, LAW_FAULTS, WildDrafter
from support.tiny import tiny_model
from support.warned import forerun_warnings

PROMPTS = ((12, 61, 7, 33), (85, 4, 19, 2))
NEW = 8
SETTINGS: Any = {"max_new_tokens": NEW, "temperature": [0.0, 0.9], "seed": 4}
# What is no fault, or one that nobody can see: a law that is plausible and not the one the tokens were drawn from.
HARMLESS = {
    "none", "right", "turned round", "every other length", "int32", "int32 and its law", "int32 lengths", "too wide",
    "sparse", "logits", "logits, nan", "tree that is a chain", "law: uniform",
}  # fmt: skip


def guess(history: Sequence[int], room: int) -> list[int]:
    """The greedy row's answer, which the other row rarely gives."""
    place = len(history) - len(PROMPTS[0])
    return list(answer(PROMPTS[0])[place : place + room])


def texts(drafter: Any, rule: str, policy: Any = 3, **more: Any) -> list[list[int]]:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=policy, rule=rule, **more)
    return decoder.generate(torch.tensor(PROMPTS), **SETTINGS).new_tokens


@lru_cache
def plain() -> list[list[int]]:
    return texts(None, "coupled")


def told(change: str, rule: str) -> tuple[list[list[int]], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForerunWarning)
        found = texts(WildDrafter(1, VOCAB, guess, change), rule)
    return found, forerun_warnings(caught)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick(every=2)
def test_a_faulty_draft_costs_itself_alone(change: str) -> None:
    """The greedy row beside a sampled one says what it says alone; what can be noticed is told, once."""
    found, warned = told(change, "token")
    assert found[0] == plain()[0] == list(answer(PROMPTS[0])[:NEW])
    assert len(found[1]) == NEW and all(0 <= token < VOCAB for token in found[1])
    assert len(warned) == (0 if change in HARMLESS else 1) or change == "tree"  # whose law is any of those


class OneRow:
    """Copies for the first row alone, and more than the others draft: a neighbour in a chain."""

    copies = True

    def propose(self, context: DraftContext) -> Draft:
        width = max(context.max_lengths)
        tokens = torch.full((len(context.rows), width), 5)
        lengths = torch.tensor([context.max_lengths[0], *[0] * (len(context.rows) - 1)])
        return Draft(tokens, lengths, PointMass(tokens, context.vocab_size), deterministic=True)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize(
    "change",
    (
        "sparse",
        "sparse, half",
        "sparse, negative",
        "sparse, huge",
        "sparse, ids",
        "logits",
        "logits, owner",
        "logits, vocabulary",
    ),
)
def test_a_law_within_a_chain_is_looked_at(change: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForerunWarning)
        texts(forerun.Chain(OneRow(), WildDrafter(1, VOCAB, guess, change)), "token")
    assert len(forerun_warnings(caught)) == (0 if change in HARMLESS else 1)


class TooShort:
    """A law of one position for drafts of two."""

    def propose(self, context: DraftContext) -> Draft:
        tokens = torch.full((len(context.rows), 1), 7)
        law = SparseLaw(tokens.unsqueeze(-1), torch.ones(len(tokens), 1, 1), context.vocab_size)
        return Draft(tokens, torch.tensor(context.max_lengths).clamp(max=2), law)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        pass


def test_a_draft_within_a_chain_is_no_longer_than_its_tokens() -> None:
    with pytest.warns(ForerunWarning, match="1 positions for a draft of 2"):
        texts(forerun.Chain(OneRow(), TooShort()), "token")


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_no_law_bends_a_greedy_row_under_the_block_rule(fault: str) -> None:
    assert told(f"law: {fault}", "block")[0][0] == plain()[0]


@pytest.mark.parametrize(
    "change", ("int32", "bool", "float", "lengths deep", "law: raises", "law: shape", "law missing")
)
@pytest.mark.parametrize("rule", ("coupled", "lenient:0.5", "sigmoid"))
@pytest.mark.quick(
    "lenient:0.5-int32", "lenient:0.5-bool", "coupled-float", "sigmoid-lengths deep", "coupled-law: raises",
    "sigmoid-law: shape", "lenient:0.5-law missing",
)  # fmt: skip
def test_under_every_rule(change: str, rule: str) -> None:
    found, _ = told(change, rule)
    assert found[0] == plain()[0]
    if rule == "coupled":
        assert found == plain()


def test_a_plain_round_in_place_of_a_draft_keeps_the_law() -> None:
    """Rounds whose draft is refused draw as rounds without a drafter do: the same numbers, the same tokens."""
    changes = ("bool", "law: at raises", "law: negative", "sparse, negative", "raises")
    for change in (*changes, "sparse, half", "law: zero", "law of other tokens"):
        assert told(change, "token")[0] == texts(None, "token")


def test_a_negative_law_leaves_nothing_where_the_target_has_nothing() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0]] * 3)
    q = torch.tensor([[-2.0, -1.0, 0.0], [-2.0, -1.0, torch.nan], [torch.nan] * 3])
    assert residual(p, q).tolist() == p.tolist()


class Rubbish:
    """A policy with one answer to everything."""

    def __init__(self, answers: Any, to: str) -> None:
        self.answers, self.to, self.good = answers, to, Constant(3)

    def lengths(self, view: BatchView) -> Any:
        return self._answer("lengths", self.good.lengths(view))

    def trim(self, view: BatchView, draft: Draft) -> Any:
        return self._answer("trim", self.good.trim(view, draft))

    def observe(self, outcome: RoundOutcome) -> None:
        self._answer("observe", None)

    def _answer(self, asked: str, good: Any) -> Any:
        if asked != self.to:
            return good
        return self.answers() if callable(self.answers) else self.answers


@pytest.mark.parametrize("to", ("lengths", "trim", "observe"))
@pytest.mark.parametrize(
    "answers",
    (lambda: 1 // 0, None, 3, "many", (1, 1, 1), (1,), (-1, -1), (1.5, 1.5), (10**9, 10**9), (True, True)),
    ids=lambda answer: "raises" if callable(answer) else str(answer),
)
@pytest.mark.quick(every=2)
def test_a_faulty_policy_costs_a_warning(answers: Any, to: str) -> None:
    expects = callable(answers) or to != "observe"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForerunWarning)
        found = texts(forerun.PromptLookup(), "coupled", policy=Rubbish(answers, to))
    assert found == plain()
    warned = forerun_warnings(caught)
    assert len(warned) <= 1 and (not expects or "Rubbish failed" in "".join(warned) or to == "trim")


class Lost:
    def propose(self, context: DraftContext) -> Draft:
        raise LookupError("where am I?")

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


def test_the_first_traceback_is_kept() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), Lost(), policy=2)
    assert decoder.engine.first_fault is None
    with pytest.warns(ForerunWarning, match=r"Lost failed \(LookupError: where am I\?\).*first_fault"):
        decoder.generate(torch.tensor(PROMPTS), max_new_tokens=4)
    assert decoder.engine.first_fault is not None
    assert "in propose" in decoder.engine.first_fault and "where am I?" in decoder.engine.first_fault


def test_strict_decoders_raise_and_stay_usable() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), Lost(), policy=2, strict=True)
    for _ in range(2):
        with pytest.raises(LookupError, match="where am I"):
            decoder.generate(torch.tensor(PROMPTS), max_new_tokens=4)
    decoder = forerun.SpeculativeDecoder(
        tiny_model("llama"), "lookup", policy=Rubbish((-1, -1), "lengths"), strict=True
    )
    with pytest.raises(InvalidArgument, match="whole numbers"):
        decoder.generate(torch.tensor(PROMPTS), max_new_tokens=4)


def test_a_draft_is_laid_side_by_side() -> None:
    """References read any layout, kernels of a GPU only this one."""
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    turned = torch.arange(6).view(2, 3).T
    whole = draft_check._whole(turned, "tokens", 2, context)
    assert whole.is_contiguous() and torch.equal(whole, turned)


class UnsureOfPredictions:
    """Copies, and does not know its own evidence again."""

    takes_predictions = True

    def __init__(self) -> None:
        self.inner = forerun.PromptLookup()
        self.propose, self.rewind = self.inner.propose, self.inner.rewind

    def is_prediction(self, evidence: int) -> bool:
        raise LookupError(evidence)


def test_a_drafter_that_does_not_know_its_predictions_costs_no_round() -> None:
    target, prompt = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    wanted = forerun.SpeculativeDecoder(target, None).generate(prompt, max_new_tokens=12).new_tokens
    decoder = forerun.SpeculativeDecoder(target, UnsureOfPredictions(), policy=3)
    with pytest.warns(ForerunWarning, match=r"UnsureOfPredictions failed .*such drafts count as drawn"):
        out = decoder.generate(prompt, max_new_tokens=12)
    assert out.new_tokens == wanted and out.stats.num_draft_tokens
