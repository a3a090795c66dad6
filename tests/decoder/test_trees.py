"""Trees and greedy text: what plain decoding says, in every family and batch; counts, stops, penalties, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import forerun
from forerun.drafters import (
    Chain,
    DraftModel,
    EarlyExit,
    FeatureHead,
    ParallelHeads,
    PromptLookup,
    SelfDraft,
    Tree,
    with_trees,
)
from forerun.engine.branching import adjusted_along
from forerun.engine.row import RowResult
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.kernels import why_not_numba
from forerun.math.attention import Form
from forerun.types import Origin
from support.batches import padded
from support.finish import tokens_by_request
from support.heads import head_of
from support.recompute import check, recomputed
from support.ties import check_greedy, deviation
from support.tiny import EXTRA_FAMILIES, FAMILIES, draft_of, plain_greedy, ragged_prompts, tiny_model
from support.warned import forerun_warnings

NEW, VOCAB = 20, 97
ALIBI = ("bloom", "falcon_alibi")
TREES = tuple(family for family in (*FAMILIES, *EXTRA_FAMILIES) if family not in ALIBI)


@lru_cache
def oracle(family: str) -> tuple[list[list[int]], list[list[int]], float]:
    model, prompts = tiny_model(family), ragged_prompts(3, VOCAB, seed=len(family))
    wanted = [plain_greedy(model, prompt, NEW) for prompt in prompts]
    return prompts, wanted, deviation(model, [*prompts[1], *wanted[1]])


def make_drafter(name: str, family: str) -> Any:
    model = tiny_model(family)
    makers = {
        "model": lambda: Tree(DraftModel(draft_of(model, 0.1)), nodes=7, width=3),
        "exit": lambda: Tree(EarlyExit(1), nodes=7, width=2),
        "head": lambda: Tree(FeatureHead(head_of(model, noise=0.05)), nodes=9, width=3, siblings="sampled"),
        "heads": lambda: Tree(ParallelHeads(head_of(model, blocks=3, noise=0.05)), nodes=6, width=2),
        "chain": lambda: Chain(PromptLookup(min_ngram=2), Tree(DraftModel(draft_of(model, 0.1)), nodes=5, width=2)),
    }
    return makers[name]()


CASES = [
    *(("model", family, rows, form) for family in TREES for rows, form in ((1, "pad"), (3, "split"))),
    *(("model", family, 3, "pad") for family in ("llama", "gemma3", "gpt2")),
    *(("chain", family, 3, "auto") for family in ("qwen3", "mistral")),
    *((name, "llama", 3, form) for name in ("exit", "head", "heads", "chain") for form in ("pad", "split")),
]


@pytest.mark.parametrize(("name", "family", "rows", "form"), CASES)
@pytest.mark.quick(every=24)
def test_greedy_text(name: str, family: str, rows: int, form: str, recwarn: pytest.WarningsRecorder) -> None:
    prompts, wanted, noise = oracle(family)
    prompts, wanted = prompts[-rows:], wanted[-rows:]
    model = tiny_model(family)
    decoder = forerun.SpeculativeDecoder(model, make_drafter(name, family), policy=4, attention=form)
    out = decoder.generate(*padded(prompts, "left"), max_new_tokens=NEW)
    assert not forerun_warnings(recwarn), "a drafter failed"
    for prompt, got, want in zip(prompts, out.new_tokens, wanted, strict=True):
        check_greedy(model, prompt, got, want, noise, f"{name} {family} {rows} {form}")
    assert out.stats.num_accepted_tokens, "nothing was ever kept, so nothing was tested"


@pytest.mark.quick("chain")
@pytest.mark.skipif(why_not_numba() is not None, reason="no compiled kernels here")
@pytest.mark.parametrize("name", ["model", "head", "chain"])
def test_greedy_text_beside_the_fused_body(name: str) -> None:
    """Rounds with trees run the modules, the others the fused body: both write the same cache."""
    prompts, wanted, noise = oracle("llama")
    model = tiny_model("llama")
    decoder = forerun.SpeculativeDecoder(model, make_drafter(name, "llama"), policy=4, kernels="on")
    assert decoder.engine.target.is_fused
    out = decoder.generate(*padded(prompts, "left"), max_new_tokens=NEW)
    for prompt, got, want in zip(prompts, out.new_tokens, wanted, strict=True):
        check_greedy(model, prompt, got, want, noise)


@pytest.mark.quick("pad-llama", "split-mistral", "pad-codegen", "split-gpt2")
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "codegen"])
@pytest.mark.parametrize("form", ["pad", "split"])
def test_every_node_is_scored_behind_its_own_path(family: str, form: str) -> None:
    """Two rows with trees, one of them with text that comes along, and one without a draft."""
    model = tiny_model(family)
    scorer = forerun.Scorer(model, Form(form))
    texts = [[5, 9, 2, 7, 7, 1, 30, 12, 4, 8, 60], [3, 1], [8, 8, 6]]
    trees = [[-1, -1, 0, 0, 2, 1], [-1, 0, -1], []]
    nodes = [[11, 12, 13, 14, 15, 16], [21, 22, 23], []]
    for row, text in enumerate(texts):
        scorer.admit(row)
        scorer.feed([row], [text[: -3 if row == 0 else -1]])
    blocks = [[*texts[0][-3:], *nodes[0]], [texts[1][-1], *nodes[1]], [texts[2][-1]]]
    logits = scorer.score(range(3), blocks, [7, 4, 1], trees).split([7, 4, 1])
    for text, parents, own, got in zip(texts, trees, nodes, logits, strict=True):
        for node in range(-1, len(own)):
            path, at = [], node
            while at >= 0:
                path, at = [own[at], *path], parents[at]
            check(got[node + 1], recomputed(model, [*text, *path])[-1])
    scorer.keep(0, len(texts[0]), [0, 2, 4])
    assert scorer.length(0) == len(texts[0]) + 3
    check(scorer.score([0], [[40, 41]]), recomputed(model, [*texts[0], 11, 13, 15, 40, 41])[-2:])


def test_features_follow_the_kept_path() -> None:
    """What a head hears of the target is the same as if the text had never been a tree."""
    model = tiny_model("llama")
    prompts, _, _ = oracle("llama")
    decoder = forerun.SpeculativeDecoder(model, Tree(FeatureHead(head_of(model)), nodes=9), policy=4)
    trunk = decoder.drafter.inner.trunk
    features, target = trunk.features, trunk._target
    heard = 0
    stream = decoder.stream(*padded(prompts[1:2], "left"), max_new_tokens=NEW)
    text = list(prompts[1])
    for (progress,) in stream:
        text += progress.tokens
        if progress.finish_reason is not None:
            break
        length = features.length(0)
        assert length == len(text) - 1
        want = model.base_model(torch.tensor([text[:length]]), use_cache=False).last_hidden_state[0]
        check(features.take([0], [0], [length], target), want)
        heard += len(progress.tokens) > 2
    assert heard, "no path of two nodes was ever kept"


@pytest.mark.slow
def test_penalties_follow_each_path() -> None:
    """Greedy text under penalties is plain decoding's, whatever the other branches hold."""
    model, (prompts, _, _) = tiny_model("llama"), oracle("llama")
    keywords: dict[str, Any] = {"max_new_tokens": NEW, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
    plain = forerun.SpeculativeDecoder(model, None).generate(*padded(prompts, "left"), **keywords)
    for way in ("top", "sampled"):
        tree = Tree(DraftModel(draft_of(model, 0.05)), nodes=8, width=3, siblings=way)
        out = forerun.SpeculativeDecoder(model, tree, policy=4).generate(*padded(prompts, "left"), **keywords)
        assert out.new_tokens == plain.new_tokens
        assert out.stats.tokens_per_round > 1.5


def test_each_node_is_adjusted_along_its_own_path() -> None:
    seen: list[tuple[list[int], int]] = []

    def spy(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        seen.append((list(drafted), first))
        return logits + len(seen)

    out = adjusted_along(torch.zeros(5, 3), [10, 11, 12, 13], [-1, -1, 0, 2], spy)
    assert seen == [([], 0), ([10], 1), ([11], 1), ([10, 12], 2), ([10, 12, 13], 3)]
    assert out[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_counts_origins_and_logprobs() -> None:
    model, (prompts, _, _) = tiny_model("llama"), oracle("llama")
    tree = Tree(DraftModel(draft_of(model, 0.1)), nodes=7, width=3)
    out = forerun.SpeculativeDecoder(model, tree, policy=3).generate(
        *padded(prompts, "left"), max_new_tokens=NEW, logprobs=True
    )
    plain = forerun.SpeculativeDecoder(model, None).generate(
        *padded(prompts, "left"), max_new_tokens=NEW, logprobs=True
    )
    for row, base in zip(out.rows, plain.rows, strict=True):
        stats = row.stats
        assert stats.num_emitted_tokens == len(row.tokens) == NEW
        assert stats.num_accepted_tokens == row.origins.count(Origin.ACCEPTED)
        assert stats.rounds + stats.num_accepted_tokens == NEW
        assert stats.num_draft_tokens > 5 * stats.num_drafts  # nodes
        assert len(stats.num_draft_tokens_per_pos) == 3  # depth
        assert _logprobs(row) == pytest.approx(_logprobs(base), abs=1e-4)


def _logprobs(row: RowResult) -> list[float]:
    return [entry.logprob for entry in row.logprobs or ()]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_budgets_and_stops(new: int) -> None:
    model, (prompts, wanted, _) = tiny_model("llama"), oracle("llama")
    decoder = forerun.SpeculativeDecoder(model, Tree(DraftModel(tiny_model("llama"))), policy=4)
    out = decoder.generate(*padded(prompts, "left"), max_new_tokens=new)
    assert out.new_tokens == [want[:new] for want in wanted]
    stop = wanted[0][new]
    out = decoder.generate(*padded(prompts[:1], "left"), max_new_tokens=NEW, eos_token_id=stop)
    assert out.new_tokens[0] == wanted[0][: wanted[0].index(stop) + 1]
    assert out.rows[0].origins[-1] in tuple(Origin)


@pytest.mark.slow
def test_rows_do_not_know_of_each_other() -> None:
    model, (prompts, _, _) = tiny_model("llama"), oracle("llama")
    drafter = Tree(DraftModel(draft_of(model, 0.1)), nodes=7, width=3, siblings="sampled")
    engine = forerun.Engine(forerun.Scorer(model), drafter, forerun.Constant(3))
    params = forerun.SamplingParams(temperature=1.0)
    found = []
    for together in (True, False):
        for i, prompt in enumerate(prompts):
            engine.add(forerun.Request(prompt=tuple(prompt), max_new_tokens=NEW, params=params, seed=5, request_id=i))
            if not together:
                while not engine.is_idle:
                    engine.step()
        found.append(tokens_by_request(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", ["block", "coupled", "lenient:0.5"])
def test_other_rules_are_refused(rule: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgument, match="token"):
        forerun.SpeculativeDecoder(model, Tree(DraftModel(model)), rule=rule)
    with pytest.raises(InvalidArgument, match="token"):
        forerun.SpeculativeDecoder(model, Chain(PromptLookup(), Tree(DraftModel(model))), rule=rule)


def gpt_neo() -> GPTNeoForCausalLM:
    """Without ALiBi, and its layers still read positions off the cache."""
    size = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    return GPTNeoForCausalLM(GPTNeoConfig(**size, attention_types=[[["global", "local"], 1]])).eval()


@pytest.mark.parametrize("family", (*ALIBI, "gpt_neo"))
def test_positions_told_by_places_are_refused(family: str) -> None:
    model = gpt_neo() if family == "gpt_neo" else tiny_model(family)
    with pytest.raises(UnsupportedModel, match="positions from where keys lie"):
        forerun.SpeculativeDecoder(model, Tree(DraftModel(model)))


def test_settings_are_checked() -> None:
    model = tiny_model("llama")
    for settings in ({"nodes": 0}, {"width": 1.5}, {"siblings": "best"}):
        with pytest.raises(InvalidArgument):
            Tree(DraftModel(model), **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="nodes=129: must be an integer from 1 to 128; every node is a position"):
        Tree(DraftModel(model), nodes=129)
    with pytest.raises(InvalidArgument, match=r"PromptLookup.*EarlyExit or SelfDraft"):
        Tree(PromptLookup())
    assert Tree(SelfDraft(8)).makes_trees
    with pytest.raises(InvalidArgument, match="stop_below"):
        Tree(DraftModel(model, stop_below=0.3))
    with pytest.raises(InvalidArgument, match=r"PromptLookup.*self:8"):
        with_trees(PromptLookup())
    grown = with_trees(Chain(PromptLookup(), DraftModel(model)), nodes=5)
    assert isinstance(grown, Chain) and isinstance(grown.parts[1], Tree) and grown.parts[1].nodes == 5


@pytest.mark.quick("auto")
@pytest.mark.parametrize("policy", ["auto", forerun.HfHeuristic(), forerun.BassHeuristic()])
def test_policies_drive_trees(policy: Any) -> None:
    """The length a policy asks for is a tree's depth, and what it hears of the round is in the same measure."""
    model, (prompts, wanted, _) = tiny_model("llama"), oracle("llama")
    for drafter in (Tree(DraftModel(draft_of(model, 0.05))), make_drafter("chain", "llama")):
        decoder = forerun.SpeculativeDecoder(model, drafter, policy=policy)
        out = decoder.generate(*padded(prompts, "left"), max_new_tokens=NEW)
        assert out.new_tokens == wanted
