"""The whole loop with heads on features and reduced vocabularies: real passes, since features come from them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from exactness.sampling import verdict
from exactness.warps import Definition
from forerun import SpeculativeDecoder
from forerun.drafters import Chain, DraftModel, FeatureHead, ParallelHeads, PromptLookup, autoregressive
from forerun.drafters.base import Drafter
from forerun.drafters.causal_folder import CausalFolder
from forerun.engine.drafting import Drafting
from forerun.loading.drafter_folder import DrafterManifest, describe_target
from forerun.math.laws import ReducedLaw
from forerun.types import BatchView, Draft, RoundOutcome
from support.heads import head_of
from support.markov import joint_law, toy_pair

COPIES = 256
PROMPTS = ((1, 2, 0, 1, 2), (2, 2), (0, 1, 1))
SOME = torch.tensor([0, 2])  # of three tokens


def drafter_of(kind: str) -> Drafter:
    target, draft = toy_pair(3)
    if kind == "feature":
        return FeatureHead(head_of(target))
    if kind == "feature-reduced":
        return FeatureHead(head_of(target), draft_vocabulary=SOME)
    if kind == "parallel":
        return ParallelHeads(head_of(target, 3, noise=0.05))
    if kind == "parallel-reduced":
        return ParallelHeads(head_of(target, 2, noise=0.05), draft_vocabulary=SOME, stop_below=0.5)
    if kind == "chain":
        return Chain(PromptLookup(min_ngram=2), FeatureHead(head_of(target), draft_vocabulary=SOME, stop_below=0.4))
    manifest = DrafterManifest("causal", 0, describe_target(target), ("embedding", "head"))
    return DraftModel(CausalFolder("toy", manifest, draft.config, dict(draft.state_dict()), SOME))


@lru_cache
def laws(warped: bool) -> list[Tensor]:
    warps = [Definition(len(p), temperature=0.8, presence=0.7) if warped else None for p in PROMPTS]
    return [joint_law(toy_pair(3)[0], prompt, 3, warp) for prompt, warp in zip(PROMPTS, warps, strict=True)]


def misfits(
    kind: str, rule: str, attention: str = "auto", warped: bool = False, policy: Any = 3, calls: int = 3
) -> list[str]:
    """Three prompts of different lengths, many copies of each, side by side."""
    decoder = SpeculativeDecoder(
        copy.deepcopy(toy_pair(3)[0]), drafter_of(kind), policy=policy, rule=rule, attention=attention
    )
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    keywords: dict[str, Any] = {"temperature": 0.8, "presence_penalty": 0.7} if warped else {"temperature": 1.0}
    samples: list[list[list[int]]] = [[], [], []]
    drafted = 0
    for seed in range(calls):
        out = decoder.generate(ids, mask, max_new_tokens=4, seed=seed, num_return_sequences=COPIES, **keywords)
        drafted += out.stats.num_draft_tokens
        for i in range(3):
            samples[i] += out.new_tokens[i * COPIES : (i + 1) * COPIES]
    assert drafted > 3 * COPIES, "nothing was drafted, so nothing was tested"
    return [verdict(found, law) for found, law in zip(samples, laws(warped), strict=True)]


@pytest.mark.slow
def test_joint_law_briefly() -> None:
    assert misfits("causal-reduced", "block", calls=1) == ["", "", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "attention"),
    [
        ("feature-reduced", "token", "split"),
        ("feature-reduced", "block", "auto"),
        ("feature-reduced", "coupled", "auto"),
        ("parallel", "block", "auto"),
        ("parallel-reduced", "token", "pad"),
        ("causal-reduced", "block", "auto"),
        ("chain", "token", "auto"),
    ],
)
def test_joint_law(kind: str, rule: str, attention: str) -> None:
    assert misfits(kind, rule, attention) == ["", "", ""]


@pytest.mark.slow
def test_joint_law_with_penalties() -> None:
    assert misfits("feature-reduced", "token", warped=True) == ["", "", ""]


class Snips:
    """Cuts copies by their evidence, and would cut drawn drafts where their first token is 0, if it were heeded."""

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(2, room) for room in view.max_lengths)

    def copy_lengths(self, view: BatchView) -> tuple[int, ...]:
        return view.max_lengths

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        assert draft.evidence is not None
        first = draft.tokens[:, 0].tolist() if draft.width else [0] * len(view.rows)
        wanted = [kind % 3 if kind < 16 else int(token != 0) for kind, token in zip(draft.evidence, first, strict=True)]
        return tuple(min(want, own) for want, own in zip(wanted, draft.lengths.tolist(), strict=True))

    def observe(self, outcome: RoundOutcome) -> None:
        self.mixed = getattr(self, "mixed", 0) + (len(set(outcome.copied or ())) == 2)


@pytest.mark.slow
def test_copies_are_cut_and_drawn_drafts_are_not() -> None:
    policy = Snips()
    assert misfits("chain", "token", policy=policy) == ["", "", ""]
    assert policy.mixed, "no round had both kinds, so nothing was tested"


@pytest.mark.slow
def test_control_cutting_a_drawn_draft_is_noticed(monkeypatch: MonkeyPatch) -> None:
    """By what it drew: the law of what is left is no longer the one it was drawn from."""
    right = Drafting.draft

    def heedless(self: Drafting, *question: Any) -> Any:
        drafted = right(self, *question)
        draft = drafted.draft
        if not draft.width:
            return drafted
        return drafted._replace(draft=replace(draft, lengths=draft.lengths * (draft.tokens[:, 0] != 0)))

    monkeypatch.setattr(Drafting, "draft", heedless)
    assert any(misfits("chain", "token", policy=Snips()))


class ClaimsAll(ReducedLaw):
    """Says that the tokens the draft cannot say had their share too."""

    def at(self, position: Tensor) -> Tensor:
        law = super().at(position)
        spread = torch.where(law > 0, law, 1 / self.vocab_size)
        return spread / spread.sum(-1, keepdim=True)

    def of(self, tokens: Tensor) -> Tensor:
        columns = [
            self.at(torch.full((len(tokens),), i)).gather(1, tokens[:, i : i + 1]) for i in range(tokens.shape[1])
        ]
        return torch.cat(columns, dim=1)


@pytest.mark.slow
def test_control_a_reduced_draft_that_claims_to_be_full_is_noticed_briefly(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(autoregressive, "ReducedLaw", ClaimsAll)
    assert any(misfits("feature-reduced", "token", calls=1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule"), [("feature-reduced", "token"), ("causal-reduced", "block")])
def test_control_a_reduced_draft_that_claims_to_be_full_is_noticed(
    kind: str, rule: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(autoregressive, "ReducedLaw", ClaimsAll)
    assert all(misfits(kind, rule))


@pytest.mark.slow
def test_control_a_law_of_the_next_position_is_noticed(monkeypatch: MonkeyPatch) -> None:
    """Off by one: the law reported for position i is that of i + 1."""
    right = autoregressive.LogitLaw

    def shifted(logits: Tensor, index: Tensor, *others: Any, kept: Any = None) -> Any:
        return right(logits, torch.cat([index[:, 1:], index[:, -1:]], dim=1), *others)

    monkeypatch.setattr(autoregressive, "LogitLaw", shifted)
    assert any(misfits("feature", "token"))
