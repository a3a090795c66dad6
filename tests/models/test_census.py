"""Every model type of transformers: exact, or refused with a reason. `docs/models.md` is written from the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from torch import Tensor

from forerun.models import attention, masks, proven
from support.census import NOT_BUILT, Recipe, build, causal_recipes, seq2seq_recipes
from support.census_judge import Outcome, assert_exact_or_refused, judge, judge_model, judge_text
from support.pinned import needs_pinned_transformers

CAUSAL, SEQ2SEQ = causal_recipes(), seq2seq_recipes()
# One of each way to be run: packed, padded, by position, with a window, with experts, with an encoder; and a refusal.
QUICK = ("gptj", "bloom", "gemma3_text", "mixtral", "mamba")


def named(name: str, recipes: list[Recipe] = CAUSAL) -> Recipe:
    return next(recipe for recipe in recipes if recipe.name == name)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=needs_pinned_transformers) for name in QUICK)])
def test_a_handful(name: str) -> None:
    finding = judge(named(name))
    assert_exact_or_refused(finding)
    assert (finding.outcome is Outcome.REFUSED) == (name == "mamba")


@pytest.mark.quick(every=2)
@needs_pinned_transformers
@pytest.mark.parametrize("name", ("longt5", "pegasus_x"))
def test_a_handful_with_an_encoder(name: str) -> None:
    finding = judge(named(name, SEQ2SEQ))
    assert_exact_or_refused(finding)
    assert (finding.outcome is Outcome.REFUSED) == (name == "pegasus_x")


@needs_pinned_transformers
def test_enough_types() -> None:
    assert len({recipe.model_type for recipe in CAUSAL}) >= 120
    assert len({recipe.model_type for recipe in SEQ2SEQ}) >= 35
    assert all(reason for reason in NOT_BUILT.values())


@needs_pinned_transformers
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*CAUSAL, *SEQ2SEQ], ids=lambda recipe: f"{recipe.class_name} {recipe.variant}")
def test_every_type(recipe: Recipe) -> None:
    """Exact or refused; and where it is exact, the list of proven classes says so."""
    finding = judge(recipe)
    assert_exact_or_refused(finding)
    if finding.outcome is Outcome.EXACT:
        assert recipe.class_name in proven.CLASSES, "run python -m benchmarks.census --write"
    elif recipe.class_name in proven.CLASSES:
        assert recipe.class_name in TWO_FOLD, f"listed as proven, and yet refused: {finding.reason}"


@needs_pinned_transformers
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*CAUSAL, *SEQ2SEQ], ids=lambda recipe: f"{recipe.class_name} {recipe.variant}")
def test_every_type_with_kernels(recipe: Recipe, monkeypatch: MonkeyPatch) -> None:
    """What was proven without kernels is run with them: fused layers where there are some, else patches of modules.

    In float32, which is what kernels of a CPU are for; texts that its rounding may turn round say nothing here.
    """
    if recipe.class_name not in proven.CLASSES:
        pytest.skip("not proven: tried before it is trusted, with its kernels")
    monkeypatch.setenv("FORERUN_KERNELS", "on")
    finding = judge_text(recipe, build(recipe).float())
    assert finding.outcome in (Outcome.EXACT, Outcome.REFUSED, Outcome.UNDECIDED), finding.reason


# Exact in one variant, refused in another: encoders that are told to be decoders.
TWO_FOLD = {recipe.class_name for recipe in CAUSAL if recipe.variant}


def test_the_list_is_of_this_transformers() -> None:
    """The version that we pin, which need not be the one installed."""
    pins = (Path(__file__).parents[2] / "requirements" / "run.txt").read_text()
    pinned = re.findall(r"^transformers==(\S+)", pins, re.MULTILINE)
    assert pinned == [proven.TRANSFORMERS], "run python -m benchmarks.census --write"


@needs_pinned_transformers
def test_the_list_is_of_types_in_the_census() -> None:
    assert {recipe.class_name for recipe in (*CAUSAL, *SEQ2SEQ)} >= proven.CLASSES
    assert len(proven.CLASSES) > 90


def _future_seen(states: Any, mask_function: Any) -> Tensor | None:
    """Every query sees one key more than it should, and its row's first no longer."""
    mask = RIGHT_MASK(states, mask_function)
    return None if mask is None else states.remember_mask(mask.roll(1, dims=-1))


RIGHT_MASK = masks.dense_mask


def test_control_a_mask_that_is_off_by_one_is_found(monkeypatch: MonkeyPatch) -> None:
    """The text is another one, which the assertion reports, and which the self-check would have refused."""
    model = build(named("llama"))
    monkeypatch.setattr(masks, "dense_mask", _future_seen)
    finding = judge_text(named("llama"), model)
    assert finding.outcome is Outcome.WRONG
    with pytest.raises(AssertionError, match="llama: wrong"):
        assert_exact_or_refused(finding)
    assert judge_model(named("llama"), model).outcome is Outcome.REFUSED


def test_control_an_obscure_error_is_found(monkeypatch: MonkeyPatch) -> None:
    """An error that is no refusal counts as wrong."""
    model = build(named("llama"))

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    assert judge_text(named("llama"), model).outcome is Outcome.EXACT
    monkeypatch.setattr(attention, "_attend", broken)
    finding = judge_text(named("llama"), model)
    assert finding.outcome is Outcome.WRONG and "RuntimeError" in finding.reason
