"""A row's sampled tokens are its own: alone, in any batch, in any order.

With a fixed draft length under every rule; under `coupled` with any drafter, length and policy. What a matrix library
does to the last bits when the batch changes shape is measured, and excuses only what it explains.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import forerun
from forerun.models.scorer import Scorer
from forerun.policy import BassHeuristic, HfHeuristic
from support.batches import padded
from support.devices import draft_on, each_device, model_on, on_gpu
from support.heads import head_of
from support.pairwise import pairwise_cases
from support.stories import Stories
from support.tiny import draft_of, ragged_prompts, tiny_model

NEW = 24
SEED = 17
IDS = [40, 3, 77, 12, 5, 60]
PROMPTS = ragged_prompts(6, 97, seed=61, longest=15)
ORDERS = [[0], [3], [0, 1], [5, 0, 2], [2, 3, 0, 1], [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]


def sample(
    decoder: forerun.SpeculativeDecoder, prompts: list[list[int]], order: list[int], **keywords: Any
) -> dict[int, list[int]]:
    """New tokens by row number; the request id goes with the row."""
    out = decoder.generate(
        *(t.to(decoder.target.device) for t in padded([prompts[i] for i in order])),
        **{"max_new_tokens": NEW, "temperature": 0.9, "seed": SEED, "request_ids": [IDS[i] for i in order], **keywords},
    )
    return dict(zip(order, out.new_tokens, strict=True))


def shape_noise(model: Any, prompts: list[list[int]]) -> float:
    """How far a row's logits move when it is scored beside others: its own last tokens, alone and in the batch."""
    together = Scorer(model)
    for row in range(len(prompts)):
        together.admit(row)
    logits = together.score(range(len(prompts)), prompts).split([len(p) for p in prompts])
    worst = 0.0
    for row, prompt in enumerate(prompts):
        alone = Scorer(model)
        alone.admit(0)
        worst = max(worst, float((alone.score([0], [prompt]) - logits[row]).abs().max()))
    return worst


def agree(runs: list[dict[int, list[int]]], noise: float) -> None:
    """Every row says the same in every run; a difference needs noise, and then at most one row in fifty may differ."""
    first: dict[int, list[int]] = {}
    pairs = [(first.setdefault(row, tokens), tokens) for run in runs for row, tokens in run.items()]
    parted = sum(a != b for a, b in pairs)
    print(f"{parted} of {len(pairs)} rows differ; logits move by {noise:.2g} with the batch's shape")  # noqa: T201
    # A draw changes when its uniform lies within the noise of a boundary: about vocabulary x noise a token.
    assert parted <= (len(pairs) // 50 if noise > 0 else 0)


def drafters(family: str, device: str = "cpu") -> dict[str, Any]:
    return {
        "none": lambda: None,
        "model": lambda: forerun.DraftModel(draft_on(family, device)),
        "cautious": lambda: forerun.DraftModel(draft_on(family, device), stop_below=0.3),
        "exit": lambda: forerun.EarlyExit(1),
        "lookup": lambda: forerun.PromptLookup(),
        "random": lambda: forerun.RandomDraft(),
    }


FACTORS = {
    "family": ("llama", "gemma3", "codegen"),
    "rule": ("token", "block", "coupled"),
    "drafter": ("model", "lookup", "exit"),
}
PAIRS = [tuple(case.values()) for case in pairwise_cases(FACTORS)]
TRIPLES = [case for case in product(*FACTORS.values()) if case not in PAIRS]
EVERYWHERE = [
    *(pytest.param(*case, "cpu") for case in PAIRS),
    *(pytest.param(*case, "cpu", marks=pytest.mark.slow) for case in TRIPLES),
    *(pytest.param(*case, "cuda", marks=on_gpu) for case in PAIRS),
]


@pytest.mark.parametrize(("family", "rule", "drafter", "device"), EVERYWHERE)
@pytest.mark.quick("llama-token-model-cpu")
def test_a_fixed_length_makes_rows_independent(family: str, rule: str, drafter: str, device: str) -> None:
    model = model_on(family, device)
    decoder = forerun.SpeculativeDecoder(model, drafters(family, device)[drafter](), policy=3, rule=rule, compile=False)
    runs = [sample(decoder, PROMPTS, order) for order in ORDERS]
    agree(runs, shape_noise(model, PROMPTS))
    assert len({tuple(tokens) for tokens in runs[-1].values()}) == 6


COPIED = [[5, 6, 7, 8] * 3, PROMPTS[2], [9, 10, 11] * 4, PROMPTS[5], [30, 31] * 5, PROMPTS[3]]  # every other is found


@pytest.mark.slow
@pytest.mark.parametrize("siblings", ("top", "sampled"))
def test_a_copy_beside_a_tree_is_judged_as_without_one(siblings: str) -> None:
    model = tiny_model("llama")
    tree = forerun.Tree(forerun.DraftModel(draft_of(model)), nodes=5, width=2, siblings=siblings)
    decoder = forerun.SpeculativeDecoder(model, forerun.Chain(forerun.PromptLookup(min_ngram=1), tree), policy=3)
    runs = [sample(decoder, COPIED, order, temperature=1.0) for order in ORDERS]
    agree(runs, shape_noise(model, COPIED))


@pytest.mark.parametrize("policy", (3, "auto"))
@pytest.mark.parametrize("drafter", (forerun.FeatureHead, forerun.ParallelHeads))
@pytest.mark.slow
def test_features_are_there_whatever_the_neighbours_are(drafter: Any, policy: Any) -> None:
    """Equal prompts are read before their first round, a single one could be read by it."""
    model, blocks = tiny_model("llama"), 1 if drafter is forerun.FeatureHead else 3
    decoder = forerun.SpeculativeDecoder(model, drafter(head_of(model, blocks, noise=0.03)), policy=policy)
    twins = [PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    runs = [sample(decoder, twins, order) for order in ([0], [1], [2], [0, 1], [2, 1, 0])]
    agree(runs, 0)


@pytest.mark.slow
def test_coupled_rows_do_not_depend_on_drafter_length_or_policy() -> None:
    model = tiny_model("llama")
    made = drafters("llama")
    settings = [("none", 0), ("model", 1), ("model", 5), ("model", "auto"), ("cautious", 4), ("lookup", HfHeuristic()),
                ("random", 2), ("exit", BassHeuristic()), ("lookup", "auto")]  # fmt: skip
    runs = []
    for number, (name, policy) in enumerate(settings):
        decoder = forerun.SpeculativeDecoder(model, made[name](), policy=policy, rule="coupled")  # type: ignore[arg-type]
        runs += [sample(decoder, PROMPTS, ORDERS[(number + i) % len(ORDERS)]) for i in (0, 3)]
        runs.append(sample(decoder, PROMPTS, list(range(6))))
    agree(runs, shape_noise(model, PROMPTS))


@each_device
def test_the_comparison_can_fail(device: str) -> None:
    """Another seed, another id, and under the token rule another draft length: other tokens."""
    model = model_on("llama", device)
    decoder = forerun.SpeculativeDecoder(model, drafters("llama", device)["model"](), policy=3)
    base, all_rows = sample(decoder, PROMPTS, ORDERS[-1]), ORDERS[-1]
    longer = forerun.SpeculativeDecoder(model, drafters("llama", device)["model"](), policy=5)
    for other in (
        sample(decoder, PROMPTS, all_rows, seed=SEED + 1),
        sample(decoder, PROMPTS, all_rows, request_ids=list(range(100, 106))),
        sample(longer, PROMPTS, all_rows),
    ):
        with pytest.raises(AssertionError):
            agree([base, other], 1e-6)


def test_equal_prompts_with_different_ids_say_different_things() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None)
    out = decoder.generate(torch.tensor([PROMPTS[1]] * 5), max_new_tokens=NEW, temperature=0.9, seed=1)
    assert len({tuple(tokens) for tokens in out.new_tokens}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("token", "coupled"))
def test_rows_of_a_real_model_are_independent(stories: Stories, rule: str) -> None:
    texts = ("Once upon a time", "Tom and Lily went", "The dog", "One day, a big", "She said", "There was a cat who")
    prompts = [stories.encode(text) for text in texts]
    drafter = forerun.DraftModel(draft_of(stories.model)) if rule == "token" else forerun.PromptLookup()
    decoder = forerun.SpeculativeDecoder(stories.model, drafter, policy=4, rule=rule)
    agree([sample(decoder, prompts, order) for order in ORDERS], shape_noise(stories.model, prompts))
