"""Every model type of transformers: exact, or refused with a reason. `docs/models.md` is written from the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from forerun.models import attention
from support.census import NOT_BUILT, Recipe, build, causal_recipes, seq2seq_recipes
from support.census_judge import Outcome, assert_exact_or_refused, judge, judge_model

CAUSAL, SEQ2SEQ = causal_recipes(), seq2seq_recipes()
# One of each way to be run: packed, padded, by position, with a window, with experts, with an encoder; and a refusal.
QUICK = ("llama", "gptj", "bloom", "gemma3_text", "mixtral", "mamba")


def named(name: str, recipes: list[Recipe] = CAUSAL) -> Recipe:
    return next(recipe for recipe in recipes if recipe.name == name)


@pytest.mark.parametrize("name", QUICK)
def test_a_handful(name: str) -> None:
    finding = judge(named(name))
    assert_exact_or_refused(finding)
    assert (finding.outcome is Outcome.REFUSED) == (name == "mamba")


@pytest.mark.parametrize("name", ("t5", "longt5"))
def test_a_handful_with_an_encoder(name: str) -> None:
    finding = judge(named(name, SEQ2SEQ))
    assert_exact_or_refused(finding)
    assert (finding.outcome is Outcome.REFUSED) == (name == "longt5")


def test_enough_types() -> None:
    assert len({recipe.model_type for recipe in CAUSAL}) >= 120
    assert len({recipe.model_type for recipe in SEQ2SEQ}) >= 35
    assert all(reason for reason in NOT_BUILT.values())


def test_control_a_mask_that_is_off_by_one_is_found(monkeypatch: MonkeyPatch) -> None:
    """Rows see one key of the future, or of their own past one less: the judge must not call that exact."""
    right = attention._dense_mask

    def shifted(states: Any, mask_function: Any) -> Tensor | None:
        mask = right(states, mask_function)
        return None if mask is None else mask.roll(-1, dims=-1) | torch.eye(mask.shape[-1])[0].bool()

    monkeypatch.setattr(attention, "_dense_mask", shifted)
    finding = judge(named("llama"))
    assert finding.outcome is Outcome.WRONG
    with pytest.raises(AssertionError, match="llama: wrong"):
        assert_exact_or_refused(finding)


def test_control_an_obscure_error_is_found(monkeypatch: MonkeyPatch) -> None:
    """An error that is no refusal counts as wrong, too."""
    model = build(named("llama"))

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    finding_before = judge_model(named("llama"), model)
    assert finding_before.outcome is Outcome.EXACT
    monkeypatch.setattr(attention, "_attend", broken)
    finding = judge_model(named("llama"), model)
    assert finding.outcome is Outcome.WRONG and "RuntimeError" in finding.reason
