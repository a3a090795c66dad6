"""One drafter for several decoders at once: each drafts as if it had been given one of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import forerun
from decoder.trained import save
from forerun.drafters import EarlyExit, FeatureHead, ParallelHeads, TopK, Tree, from_folder
from forerun.engine import Stats
from forerun.errors import ForerunWarning
from forerun.math.laws import PointMass
from forerun.types import Draft, DraftContext
from support.heads import head_of
from support.tiny import draft_of, ragged_prompts, tiny_model

CAUSAL: dict[str, Callable[[PreTrainedModel], Any]] = {
    "model": lambda model: forerun.DraftModel(draft_of(model)),
    "lookup": lambda model: forerun.PromptLookup(),
    "exit": lambda model: EarlyExit(1),
    "feature": lambda model: FeatureHead(head_of(model)),
    "parallel": lambda model: ParallelHeads(head_of(model, 3)),
    "chain": lambda model: forerun.Chain(forerun.PromptLookup(min_ngram=2), forerun.DraftModel(draft_of(model))),
    "tree": lambda model: Tree(FeatureHead(head_of(model))),
    "top-k": lambda model: TopK(forerun.DraftModel(draft_of(model)), 5),
}
SEQ2SEQ: dict[str, Callable[[PreTrainedModel], Any]] = {
    "borrowed encoder": lambda model: forerun.DraftModel(draft_of(model), shares_encoder=True),
    "own encoder": lambda model: forerun.DraftModel(draft_of(model)),
    "lookup": lambda model: forerun.PromptLookup(),
}
Outcome = tuple[list[list[int]], Stats]


def decoder(model: PreTrainedModel, drafter: Any, **settings: Any) -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(model, drafter, policy=3, **settings)


def stream(ours: forerun.SpeculativeDecoder, prompts: Sequence[Sequence[int]], seed: int) -> forerun.Stream:
    """Drawn with drafts, so that other drafts are another text. Rows come and go at their own pace."""
    width = max(map(len, prompts))
    ids = torch.tensor([[7] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ours.stream(ids, mask, max_new_tokens=24, temperature=1.0, seed=seed)


def finished(streams: Sequence[forerun.Stream]) -> list[Outcome]:
    """All of them, a round of each in turn."""
    left = list(streams)
    while left:
        left = [one for one in left if next(one, None) is not None]
    return [(one.result.new_tokens, one.result.stats) for one in streams]


def same(found: Outcome, wanted: Outcome) -> None:
    (tokens, stats), (own_tokens, own) = found, wanted
    assert tokens == own_tokens
    assert (stats.num_drafts, stats.num_draft_tokens) == (own.num_drafts, own.num_draft_tokens)
    assert stats.num_accepted_tokens_per_pos == own.num_accepted_tokens_per_pos


def check_two(model: PreTrainedModel, make: Callable[[PreTrainedModel], Any]) -> None:
    """In turns, and then one after the other, as each would have decoded alone."""
    jobs = [(ragged_prompts(3, 97, 1), 1), (ragged_prompts(2, 97, 2, longest=60), 2)]
    alone = [finished([stream(decoder(model, make(model)), *job)])[0] for job in jobs]
    shared = make(model)
    both = [decoder(model, shared), decoder(model, shared)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        found = finished([stream(ours, *job) for ours, job in zip(both, jobs, strict=True)])
        later = finished([stream(both[0], *jobs[1])])[0]
    for one, own in zip(found, alone, strict=True):
        same(one, own)
    same(later, alone[1])
    assert sum(stats.num_draft_tokens for _, stats in alone), "nothing was drafted"


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_two_decoders_in_turns(name: str) -> None:
    check_two(tiny_model("llama"), CAUSAL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_two_decoders_that_read_sources(name: str) -> None:
    check_two(tiny_model("t5"), SEQ2SEQ[name])


@pytest.mark.slow
def test_two_decoders_and_a_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", "causal", "llama", reduced=True)
    check_two(tiny_model("llama"), lambda model: from_folder(folder))


def test_two_targets_share_the_drafts_weights() -> None:
    """Rows of other targets, other kernels: what is shared is the model and nothing else."""
    model = tiny_model("llama")
    shared = forerun.DraftModel(draft_of(model))
    one, other = decoder(model, shared).drafter, decoder(tiny_model("llama", seed=1), shared).drafter
    assert one.scorer.model is other.scorer.model is shared.scorer.model
    assert one.scorer.cache is not other.scorer.cache


class Remembering:
    """One of a user's own, with state by row and no `clone`."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.rows[row] = list(prompt)

    def release(self, row: int) -> None:
        self.rows.pop(row, None)

    def propose(self, context: DraftContext) -> Draft:
        tokens = torch.tensor([[self.rows[row][-1]] for row in context.rows])
        return Draft(tokens, torch.tensor(context.max_lengths).clamp(max=1), PointMass(tokens, context.vocab_size))

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """What it remembers is the prompt."""


def test_one_of_ones_own_that_cannot_tell_two_decoders_apart_is_told_of() -> None:
    shared, model = Remembering(), tiny_model("llama")
    both = [decoder(model, shared), decoder(model, shared)]
    assert both[0].drafter is both[1].drafter is shared
    prompts = ragged_prompts(2, 97, 1)
    with pytest.warns(ForerunWarning, match=r"Remembering keeps rows of two decoders .* clone\(\)"):
        finished([stream(ours, prompts, 1) for ours in both])


class HandingOn:
    """Hands everything but a count on to another, whose `clone` is not its own."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.drafts = inner, 0

    def propose(self, context: DraftContext) -> Draft:
        self.drafts += 1
        draft: Draft = self.inner.propose(context)
        return draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_who_hands_everything_on_is_not_left_out() -> None:
    model = tiny_model("llama")
    around = HandingOn(forerun.DraftModel(draft_of(model)))
    ours = decoder(model, around)
    assert ours.drafter is around
    finished([stream(ours, ragged_prompts(2, 97, 1), 1)])
    assert around.drafts > 0


def test_one_after_the_other_nobody_is_told_anything() -> None:
    shared, model = Remembering(), tiny_model("llama")
    both = [decoder(model, shared), decoder(model, shared)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        for ours in (*both, both[0]):
            finished([stream(ours, ragged_prompts(2, 97, 1), 1)])
