"""Models in the middle of their training: calls decode without dropout, and leave every module in the mode it had."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import forerun
from forerun import DraftModel, EarlyExit, FeatureHead, SpeculativeDecoder
from forerun.models import evaluation
from forerun.models.evaluation import Evaluation
from support.heads import head_of
from support.tiny import tiny_model

PROMPT = torch.tensor([[5, 9, 3, 60, 2, 7, 11]])
NEW = 12
DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
SAMPLED: Any = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 1}


def own_model(seed: int = 0) -> PreTrainedModel:
    """Of a family whose text changes with every call while it trains."""
    return copy.deepcopy(tiny_model("gpt2", seed, **DROPOUT))


def in_training(*models: nn.Module) -> list[list[bool]]:
    """All but a part of each: what was evaluated before is evaluated afterwards."""
    for model in models:
        model.train()
        next(iter(model.children())).eval()
    return modes(*models)


def modes(*models: nn.Module) -> list[list[bool]]:
    return [[module.training for module in model.modules()] for model in models]


def test_one_engine_that_ends_does_not_send_the_model_of_another_back_to_its_training() -> None:
    model = own_model()
    decoder = SpeculativeDecoder(model, "lookup", kernels="off")
    want = decoder.generate(PROMPT, max_new_tokens=NEW, drafter="off").new_tokens
    before = in_training(model)
    short, long = decoder.stream(PROMPT, max_new_tokens=4), decoder.stream(PROMPT, max_new_tokens=NEW, drafter="off")
    next(short)
    next(long)
    assert list(short) and not any(modes(model)[0])
    for _ in long:
        pass
    assert long.result.new_tokens == want
    assert modes(model) == before


def test_whatever_is_made_anew_leaves_the_mode_as_it_was() -> None:
    model, draft = own_model(), own_model(1)
    before = in_training(model, draft)
    drafter = DraftModel(draft)
    assert modes(model, draft) == before
    decoder = SpeculativeDecoder(model, drafter, policy=2, kernels="off", self_check=True)
    assert modes(model, draft) == before
    decoder.generate(PROMPT, max_new_tokens=3)
    decoder.generate(PROMPT, max_new_tokens=3, drafter="off")
    assert modes(model, draft) == before
    for changed in (model, draft):
        changed.lm_head.register_forward_hook(lambda *call: None)
        decoder.generate(PROMPT, max_new_tokens=3)
        assert modes(model, draft) == before
    decoder.engine.warm_up(rows=1, context=16)
    assert modes(model, draft) == before


DRAFTERS: dict[str, Callable[[Any], tuple[Any, tuple[nn.Module, ...]]]] = {
    "model": lambda model: (DraftModel(draft := own_model(1)), (draft,)),
    "tree": lambda model: (forerun.Tree(DraftModel(draft := own_model(1)), nodes=5, width=2), (draft,)),
    "chain": lambda model: (forerun.Chain(forerun.PromptLookup(), DraftModel(draft := own_model(1))), (draft,)),
    "exit": lambda model: (EarlyExit(1), ()),
    "head": lambda model: (FeatureHead(head := head_of(model)), (head,)),
}


@pytest.mark.quick("model", "head")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_draft_without_dropout(kind: str) -> None:
    model = tiny_model("llama") if kind == "head" else own_model()
    drafter, models = DRAFTERS[kind](model)
    decoder = SpeculativeDecoder(model, drafter, policy=3, kernels="off")
    want = decoder.generate(PROMPT, **SAMPLED).new_tokens
    trained = (*models, *(() if kind == "head" else (model,)))
    before = in_training(*trained)
    stream = decoder.stream(PROMPT, **SAMPLED)
    next(stream)
    assert not any(map(any, modes(*trained)))
    for _ in stream:
        pass
    assert stream.result.new_tokens == want
    assert modes(*trained) == before


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that drops half of what it knows says something else."""
    model, draft = own_model(), own_model(1)
    decoder = SpeculativeDecoder(model, DraftModel(draft), policy=3, kernels="off")
    monkeypatch.setattr(DraftModel, "draft_models", ())
    want = decoder.generate(PROMPT, **SAMPLED).new_tokens
    draft.train()
    assert decoder.generate(PROMPT, **SAMPLED).new_tokens != want


def test_modules_that_models_share_wait_for_the_last() -> None:
    shared, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = nn.Sequential(shared, alone), nn.Sequential(shared).eval()
    shared.train()
    first, second = Evaluation((one,)), Evaluation((other,))
    first.end()
    first.end()
    assert (one.training, alone.training, shared.training) == (True, True, False)
    second.end()
    assert (shared.training, other.training) == (True, False)


def test_an_evaluation_that_nobody_holds_ends() -> None:
    model = nn.Linear(2, 2)
    unheld = Evaluation((model,))
    assert not model.training
    del unheld
    gc.collect(1)
    assert model.training


class CollectedBetween(weakref.WeakKeyDictionary[nn.Module, int]):
    """The collector may run at any call: here it does so whenever a count was read, before the new one is written.

    Over what is young, as it mostly does: a look at all that a test process holds takes it a second.
    """

    def get(self, key: nn.Module, default: Any = None) -> Any:
        count = super().get(key, default)
        gc.collect(1)
        return count

    def __getitem__(self, key: nn.Module) -> int:
        count = super().__getitem__(key)
        gc.collect(1)
        return count


class Cycle:
    """Nobody holds it but itself, until the collector comes."""

    def __init__(self, held: Evaluation) -> None:
        self.held, self.itself = held, self


@pytest.mark.parametrize("between", ["taken", "given back"])
def test_what_the_collector_ends_while_another_counts_is_counted(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        counts = CollectedBetween()
        patch.setattr(evaluation, "_evaluations", counts)
        if between == "taken":
            Cycle(Evaluation((model,)))
            held = Evaluation((model,))
        else:
            held = Evaluation((model,))
            dropped = Cycle(Evaluation((model,)))
            del dropped
        assert not model.training
        held.end()
        assert model.training and not counts


def test_models_that_cannot_be_taken_hold_up_nobody_else() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AttributeError):
        Evaluation((model, None))  # type: ignore[arg-type]
    gc.collect(1)
    assert model.training
    with Evaluation((model,)):
        assert not model.training
    assert model.training
