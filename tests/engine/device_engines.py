"""Engines over tiny models whose rounds go step by step, or are sent to a device that is this very CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from exactness.sampling import counted
from forerun.cache.base import KeyValueCache
from forerun.config import Kernels, SamplingParams
from forerun.drafters import (
    Chain,
    DraftModel,
    EarlyExit,
    FeatureHead,
    ParallelHeads,
    PromptLookup,
    RandomDraft,
    Tree,
)
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.device.capture import Work
from forerun.engine.device.choose import runner_of
from forerun.engine.device.recorder import Recorder
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.policy.base import Policy
from forerun.types import Rule
from support.finish import tokens_by_request
from support.heads import head_of
from support.tiny import draft_of, ragged_prompts, tiny_model, with_fewer_ids

Texts = dict[int, tuple[int, ...]]
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams()
CUT = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter | None]] = {
    "model": lambda model: DraftModel(draft_of(model)),
    "none": lambda model: None,
    "lookup": lambda model: PromptLookup(max_ngram=1),
    "random": lambda model: RandomDraft(),
    "doubting": lambda model: DraftModel(draft_of(model), stop_below=0.4),
    "chain": lambda model: Chain(PromptLookup(max_ngram=1), DraftModel(draft_of(model))),
    "exit": lambda model: EarlyExit(1),
    "chain of a head": lambda model: Chain(PromptLookup(max_ngram=1), FeatureHead(head_of(model, noise=0.03))),
    "feature": lambda model: FeatureHead(head_of(model, noise=0.03)),
    "few words": lambda model: FeatureHead(head_of(model, noise=0.03), draft_vocabulary=torch.arange(1, 97, 3)),
    "tree": lambda model: Tree(DraftModel(draft_of(model)), nodes=9, width=3, siblings="sampled"),
    "top tree": lambda model: Tree(DraftModel(draft_of(model)), nodes=9, width=3),
    "small tree": lambda model: Tree(DraftModel(draft_of(model)), nodes=3, width=2, siblings="sampled"),
    "tree of exit": lambda model: Tree(EarlyExit(1), nodes=9, width=3, siblings="sampled"),
    "tree of feature": lambda model: Tree(FeatureHead(head_of(model, noise=0.03)), nodes=9, siblings="sampled"),
    "tree of parallel": lambda model: Tree(ParallelHeads(head_of(model, 3, noise=0.03)), nodes=9, siblings="sampled"),
    "fewer ids": lambda model: DraftModel(with_fewer_ids(draft_of(model), 80)),
    "chain of fewer ids": lambda model: Chain(
        PromptLookup(max_ngram=1), DraftModel(with_fewer_ids(draft_of(model), 80))
    ),
    "tree of fewer ids": lambda model: Tree(
        DraftModel(with_fewer_ids(draft_of(model), 80)), nodes=9, width=3, siblings="sampled"
    ),
    "copies before a tree": lambda model: copies_before("tree", model),
    "copies before a top tree": lambda model: copies_before("top tree", model),
    "copies before a small tree": lambda model: copies_before("small tree", model),
    "copies before a tree of exit": lambda model: copies_before("tree of exit", model),
    "copies before a tree of feature": lambda model: copies_before("tree of feature", model),
    "copies before a tree of parallel": lambda model: copies_before("tree of parallel", model),
    "copies before a tree of fewer ids": lambda model: copies_before("tree of fewer ids", model),
    "table": lambda model: counted(97),
    "chain of a table": lambda model: Chain(PromptLookup(max_ngram=1), counted(97)),
    "table before a model": lambda model: Chain(counted(97), DraftModel(draft_of(model))),
    "parallel": lambda model: ParallelHeads(head_of(model, blocks=3, noise=0.03)),
}


def copies_before(name: str, model: PreTrainedModel) -> Chain:
    drafter = DRAFTERS[name](model)
    assert drafter is not None
    return Chain(PromptLookup(max_ngram=1), drafter)


class Rehearsing(Recorder):
    """Records as on a GPU, short of the graph: the work is run once before it counts."""

    def record(self, work: Work, state: Sequence[Tensor], whole: bool = False) -> Work:
        self.rehearse(work, state, whole)
        self.num_recordings += 1
        self.seconds += 1.0
        return work


def rehearsing(made: Engine) -> Engine:
    """The same engine with such a recorder."""
    assert made.runner is not None
    made.runner.recorder = made.runner.recordings.recorder = Rehearsing(made.target.device)
    return made


def engine(
    on_device: bool, *, family: str = "llama", drafter: str = "model", policy: Policy | int = 4,
    rule: Rule = Rule.TOKEN, keep_rows: int = 0, ahead: bool = True, cache: KeyValueCache | None = None,
    double: bool = False, first_from_prompt: bool = False,
) -> Engine:  # fmt: skip
    """With `first_from_prompt` first tokens are drawn from the passes over prompts, or as those would draw them."""
    model = copy.deepcopy(tiny_model(family)).double() if double else tiny_model(family)
    target = Scorer(model, cache=cache, use=Kernels.OFF)
    guesser = DRAFTERS[drafter](model)
    chosen = Constant(policy) if isinstance(policy, int) else policy
    # Before recorded rounds prompts are encoded first; heads draft for a row once that has happened.
    made = Engine(target, guesser, chosen, rule=rule, keep_rows=keep_rows, ahead=ahead, join_tokens=0)
    made.pair.first_from_prompt = first_from_prompt and not target.observers
    if on_device:
        made.pair.runner = runner_of(target, made.drafter, rule, made.clock)
        if first_from_prompt:
            made.runner.record_prompts(with_head=made.first_from_prompt)
    return made


def requests(number: int, params: SamplingParams | Sequence[SamplingParams] = SAMPLED, new: int = 18) -> list[Request]:
    """Rows of different lengths that end at different times."""
    each = [params] * number if isinstance(params, SamplingParams) else params
    return [
        Request(prompt=tuple(prompt), max_new_tokens=new + 5 * (i % 3), params=each[i], seed=3, request_id=i)
        for i, prompt in enumerate(ragged_prompts(number, 97, 0))
    ]


class InPython:
    """A processor that only Python can call."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 0.5 * (torch.arange(scores.shape[-1]) == input_ids[0, -1])


def finish(made: Engine) -> Texts:
    return tokens_by_request(made)


def texts(made: Engine, asked: Sequence[Request]) -> Texts:
    for request in asked:
        made.add(request)
    found = finish(made)
    assert made.target.cache.rows == () or made.prefixes.limit
    return found


def flown(made: Engine) -> list[int]:
    """Rows of each round sent to the device from now on."""
    assert made.runner is not None
    seen, launch = [], made.runner.launch

    def counted(rows: Any, *rest: Any) -> None:
        launch(rows, *rest)
        seen.append(len(rows))

    made.runner.launch = counted  # type: ignore[method-assign]
    return seen
