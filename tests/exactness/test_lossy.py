"""Lossy rules through the whole loop: they differ from the target by as much as they say, and lossless ones do not.

Both directions are controls: the same test accepts each rule's own law and rejects the other's.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness.sampling import PROMPT, Loop, verdict
from forerun import SpeculativeDecoder
from forerun.checks.base import CheckedPair, Outcome
from forerun.checks.divergence import measure_divergence
from forerun.checks.settings import CheckSettings
from forerun.checks.suite import check_pair
from forerun.config import SamplingParams
from forerun.drafters import DraftModel
from forerun.errors import ForerunWarning
from forerun.lossy import Ensemble, Lenient, Sigmoid, TopKImportance
from forerun.math.laws import LogitLaw
from forerun.math.lossy import LossyRule, total_variation
from forerun.rules import AnyRule, Rule
from forerun.types import Draft, DraftContext, LawParams
from support.markov import joint_law, toy_pair
from support.recompute import check, recomputed
from support.tiny import draft_of, ragged_prompts, tiny_model

NUMBER = 4000
VOCAB = 5
LOSSY: tuple[LossyRule, ...] = (
    Lenient(0.2), Ensemble(0.2), Sigmoid(), Sigmoid(as_published=True), TopKImportance(3), TopKImportance(3, False),
)  # fmt: skip


def first_laws(rule: LossyRule) -> tuple[Tensor, Tensor]:
    """The law of the first token after the prompt: the rule's own, and the target's. [V] float64 each."""
    params = LawParams.stack([SamplingParams(temperature=1.0)])
    logits = [recomputed(copy.deepcopy(model).double(), list(PROMPT))[-1:] for model in toy_pair(VOCAB)]
    target, draft = (LogitLaw.dense(z[None], params) for z in logits)
    zero = torch.zeros(1, dtype=torch.int64)
    return rule.emitted_law(target, draft, zero)[0], target.at(zero)[0]


def first_tokens(rule: AnyRule) -> list[tuple[int, ...]]:
    return [tokens[:1] for tokens in Loop("model", "3", rule, vocab=VOCAB).sample(NUMBER, max_new_tokens=2)]


@pytest.mark.quick("lenient:0.2")
@pytest.mark.parametrize("rule", LOSSY, ids=lambda rule: rule.name)
def test_the_first_token_differs_from_the_target_as_predicted(rule: LossyRule) -> None:
    own, target = first_laws(rule)
    tokens = first_tokens(rule)
    assert not verdict(tokens, own)
    assert verdict(tokens, target)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=VOCAB).double()
    assert float(total_variation(counts / NUMBER, target)) == pytest.approx(
        float(total_variation(own, target)), abs=0.02
    )


@pytest.mark.slow
def test_the_lossless_rule_passes_the_same_test_and_fails_the_others() -> None:
    tokens = first_tokens(Rule.TOKEN)
    assert not verdict(tokens, joint_law(toy_pair(VOCAB)[0], PROMPT, 1))
    for rule in LOSSY:
        assert verdict(tokens, first_laws(rule)[0]), rule.name


class Noting:
    """A drafter that notes the law it reported for the first drafted token of each history."""

    def __init__(self, inner: DraftModel) -> None:
        self.inner, self.seen = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, context: DraftContext) -> Draft:
        draft = self.inner.propose(context)
        first = draft.law.at(torch.zeros_like(draft.lengths))
        self.seen += [(list(h), first[b]) for b, h in enumerate(context.histories) if draft.lengths[b] > 0]
        return draft

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.inner.rewind(rows, lengths)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("attention", ["pad", "split"])
def test_tokens_that_were_never_scored_are_scored_later(attention: str) -> None:
    """Published TopK emits candidates the target has not read; caches must hold what stands, not what was drafted."""
    target = tiny_model("llama")
    draft = draft_of(target, noise=0.05)
    drafter = Noting(DraftModel(draft))
    decoder = SpeculativeDecoder(target, drafter, policy=3, rule=TopKImportance(4), attention=attention)
    prompts = ragged_prompts(3, 97, seed=5, longest=9)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    scorer, seen = decoder.engine.target, []
    inner = scorer.score

    def score(rows: Sequence[int], blocks: Sequence[Sequence[int]], tails: Sequence[int]) -> Tensor:
        logits = inner(rows, blocks, tails)
        parts = zip(rows, blocks, tails, logits.split(list(tails)), strict=True)
        for row, block, tail, part in parts:
            seen.append(([*decoder.engine.roster.running[row].history, *block[len(block) - tail + 1 :]], part))
        return logits

    scorer.score = score  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        out = decoder.generate(ids, mask, max_new_tokens=24, temperature=1.0, seed=2, eos_token_id=[])
    assert out.stats.num_accepted_tokens > 10
    assert len(seen) > 20
    for history, logits in seen:
        check(logits, recomputed(target, history)[-len(logits) :])
    for history, law in drafter.seen:
        torch.testing.assert_close(law, recomputed(draft, history)[-1].softmax(-1), rtol=0, atol=1e-4)
    assert [len(row) for row in out.new_tokens] == [24] * 3


def test_some_published_tokens_were_not_the_drafts_own() -> None:
    """What the test above is about does happen: with the draft's own tokens it would prove nothing."""
    drafted: list[list[int]] = []

    class Keeping(Noting):
        def propose(self, context: DraftContext) -> Draft:
            draft = self.inner.propose(context)
            drafted.extend([*context.histories[b], *row] for b, row in enumerate(draft.tokens.tolist()))
            return draft

    target = tiny_model("llama")
    decoder = SpeculativeDecoder(
        target, Keeping(DraftModel(draft_of(target, 0.05))), policy=3, rule="topk_importance:4"
    )
    out = decoder.generate(torch.tensor([[5, 7, 9]]), max_new_tokens=24, temperature=1.0, seed=2, eos_token_id=[])
    text = [5, 7, 9, *out.new_tokens[0]]
    parted = sum(text[: len(d)] != d[: len(text)] and text[: len(d) - 3] == d[:-3] for d in drafted)
    assert parted > 3


def test_the_word_is_in_the_result() -> None:
    target = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5]])
    lossy = SpeculativeDecoder(target, DraftModel(draft_of(target, 0.05)), policy=2, rule="lenient:0.5")
    out = lossy.generate(ids, max_new_tokens=4, temperature=1.0)
    assert out.lossy is not None
    assert "lenient:0.5" in out.lossy and "lossy" in out.lossy and "does not follow" in out.lossy
    assert out.lossy in str(out.stats) and "LOSSY" in repr(out) and out.stats.as_dict()["lossy"] == out.lossy
    plain = SpeculativeDecoder(target, None).generate(ids, max_new_tokens=4, temperature=1.0)
    assert plain.lossy is None and "LOSSY" not in repr(plain) and "lossy:" not in str(plain.stats)
    assert plain.stats.as_dict()["lossy"] is None


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("rule", LOSSY, ids=lambda rule: rule.name)
def test_greedy_text_is_the_targets_under_every_rule(rule: LossyRule) -> None:
    target = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5], [6, 1, 2]])
    want = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    decoder = SpeculativeDecoder(target, DraftModel(draft_of(target, 0.05)), policy=3, rule=rule)
    alone = decoder.generate(ids, max_new_tokens=8)
    assert alone.sequences.tolist() == want.tolist()
    beside = decoder.generate(ids, max_new_tokens=8, temperature=[0.0, 1.0], seed=1)
    assert beside.new_tokens[0] == alone.new_tokens[0]


PROMPTS = [prompt + prompt[:4] for prompt in ragged_prompts(3, 97, seed=5, longest=12)]
PLAN = CheckSettings(samples=100, max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Lenient(0.99), TopKImportance(5)], ids=lambda rule: rule.name)
def test_check_fails_a_lossy_rule_even_where_samples_cannot_tell(rule: LossyRule) -> None:
    pair = CheckedPair(tiny_model("llama"), DraftModel(draft_of(tiny_model("llama"), 0.05)), 3, rule)
    report = check_pair(pair, PROMPTS, PROMPTS[1:], PLAN)
    assert not report.passed
    found = {finding.name: finding for finding in report.findings}["lossy rule"]
    assert found.outcome is Outcome.FAILED
    assert rule.warning in found.summary and "off by" in found.summary
    assert 0 < found.numbers["divergence"]["total_variation"] < 1
    assert found.numbers["lossless"]["total_variation"] < 1e-6
    outcomes = Counter(finding.outcome for finding in report.findings if finding.name == "greedy text")
    assert outcomes == {Outcome.PASSED: 1}


def test_divergence_is_measured_on_the_targets_own_text_for_all_rules_at_once() -> None:
    pair = CheckedPair(tiny_model("llama"), DraftModel(draft_of(tiny_model("llama"), 0.05)), 3)
    rules = [Lenient(0.9), Lenient(0.5), Lenient(0.1), Ensemble(0.5), Sigmoid(), Sigmoid(as_published=True)]
    found = measure_divergence(
        pair, PROMPTS, rules, SamplingParams(temperature=1.0, top_k=8), max_new_tokens=12, seed=1
    )
    means = {name: divergence.as_dict() for name, divergence in found.items()}
    assert list(means) == ["token", *(rule.name for rule in rules)]
    assert len({m["positions"] for m in means.values()}) == 1 and means["token"]["positions"] > 10
    assert means["token"]["total_variation"] < 1e-6 and means["token"]["kl"] == pytest.approx(0, abs=1e-6)
    distances = [means[rule.name]["total_variation"] for rule in rules[:3]]
    assert distances == sorted(distances) and distances[-1] > 0.05
    overlap, half = means["token"]["acceptance"], means["ensemble:0.5"]
    assert half["total_variation"] == pytest.approx((1 - overlap) / 2, rel=1e-4)  # (1 - w) TV(p, q)
    assert half["positions_outside_support"] > 0 == means["lenient:0.1"]["positions_outside_support"]
    published = means[rules[-1].name]
    assert published["bonus_total_variation"] > 0.1 > means[rules[-2].name]["bonus_total_variation"]
