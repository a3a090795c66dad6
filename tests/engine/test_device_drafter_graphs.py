"""Drafters made of the target's own parts, replayed from CUDA graphs: tokens of rounds step by step, and the law."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from engine.graphs import GREEDY, MIXED, VOCAB, law, requests, samples_of, texts
from engine.options import OPTIONS
from exactness.sampling import counted, verdict
from forerun.drafters import Chain, DraftModel, EarlyExit, FeatureHead, ParallelHeads, PromptLookup, Tree
from forerun.drafters.base import Drafter
from forerun.drafters.features import Features
from forerun.engine import Engine, Request
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from support.heads import head_of
from support.interpreter import DEVICE, on_gpu_alone
from support.markov import toy_pair
from support.tiny import draft_of, tiny_model

pytestmark = [pytest.mark.gpu, on_gpu_alone]

DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "exit": lambda model: EarlyExit(1),
    "feature": lambda model: FeatureHead(head_of(model, noise=0.03)),
    "few words": lambda model: FeatureHead(head_of(model, noise=0.03), draft_vocabulary=torch.arange(1, 97, 3)),
    "parallel": lambda model: ParallelHeads(head_of(model, blocks=4, noise=0.03)),
    "table": lambda model: counted(97),
    "chain of a table": lambda model: Chain(PromptLookup(max_ngram=1), counted(97)),
    "tree": lambda model: Tree(DraftModel(draft_of(model).to(DEVICE)), nodes=9, siblings="sampled"),
    "top tree": lambda model: Tree(DraftModel(draft_of(model).to(DEVICE)), nodes=9),
    "tree of feature": lambda model: Tree(FeatureHead(head_of(model, noise=0.03)), nodes=9, siblings="sampled"),
    "copies before a tree": lambda model: Chain(PromptLookup(max_ngram=1), DRAFTERS["tree"](model)),
    "copies before a top tree": lambda model: Chain(PromptLookup(max_ngram=1), DRAFTERS["top tree"](model)),
    "copies before a tree of feature": lambda model: Chain(
        PromptLookup(max_ngram=1), DRAFTERS["tree of feature"](model)
    ),
}


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


@lru_cache
def target_of(family: str) -> PreTrainedModel:
    return copy.deepcopy(tiny_model(family)).to(DEVICE)


def engine(compile: bool, drafter: str, family: str = "llama", length: int = 4) -> Engine:
    made = Engine(
        Scorer(target_of(family)), DRAFTERS[drafter](tiny_model(family)), Constant(length), compile=compile,
        join_tokens=0,
    )  # fmt: skip
    assert made.runner is None or made.runner.whole_rounds
    return made


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_as_step_by_step(drafter: str, number: int) -> None:
    made = engine(True, drafter)
    want = texts(engine(False, drafter), requests(number, *MIXED))
    assert texts(made, requests(number, *MIXED)) == want
    assert made.runner is not None and made.runner.recorder.num_recordings >= 3
    assert texts(made, requests(number, *MIXED)) == want, "a replayed graph"


def with_options() -> list[Request]:
    """One row of each kind, and one without an option."""
    asked = requests(len(OPTIONS) + 1, *MIXED)
    return [*map(lambda change, request: change(request), OPTIONS.values(), asked), asked[-1]]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_options_of_rows_inside_graphs(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts(engine(False, drafter), with_options())
    made = engine(True, drafter)
    monkeypatch.setattr("forerun.engine.rounds.run_on_host", lambda *_, **__: pytest.fail("a round went step by step"))
    assert texts(made, with_options()) == want
    assert texts(made, with_options()) == want, "a replayed graph"


@pytest.mark.parametrize("family", ("llama", "qwen3", "gpt2"))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_that_of_generate(drafter: str, family: str) -> None:
    found, model = texts(engine(True, drafter, family), requests(3, GREEDY)), target_of(family)
    for request in requests(3, GREEDY):
        ids = torch.tensor([request.prompt], device=DEVICE)
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False
        )
        assert found[request.request_id] == tuple(full[0, ids.shape[1] :].tolist()), request.request_id


def samples(drafter: str) -> list[tuple[int, ...]]:
    target = toy_pair(VOCAB)[0]
    made = Engine(Scorer(copy.deepcopy(target).to(DEVICE)), _toy_drafter(drafter, target), Constant(3))
    assert made.runner is not None and made.runner.whole_rounds
    return samples_of(made)


def _toy_drafter(name: str, target: PreTrainedModel) -> Drafter:
    if name == "few words":
        return FeatureHead(head_of(target, noise=0.1), draft_vocabulary=torch.arange(0, VOCAB, 2))
    if name.startswith("copies before a "):
        return Chain(PromptLookup(max_ngram=1), _toy_drafter(name.removeprefix("copies before a "), target))
    if "table" in name:
        return Chain(PromptLookup(max_ngram=1), counted(VOCAB)) if "chain" in name else counted(VOCAB)
    if name in ("tree", "top tree"):
        draft = copy.deepcopy(toy_pair(VOCAB)[1]).to(DEVICE)
        return Tree(DraftModel(draft), nodes=6, width=2, siblings="sampled" if name == "tree" else "top")
    return DRAFTERS[name](target)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_law_of_the_whole_loop(drafter: str) -> None:
    assert not verdict(samples(drafter), law())


def test_control_features_that_nobody_writes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts(engine(False, "feature"), requests(3))
    monkeypatch.setattr(Features, "write_at", lambda *given: None)
    assert texts(engine(True, "feature"), requests(3)) != want
