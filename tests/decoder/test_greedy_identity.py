"""Greedy output is the output of `model.generate(do_sample=False)`: every family, drafter, policy, rule and form."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import forerun
from forerun.errors import ForerunWarning
from forerun.policy import BassHeuristic, Constant, HfHeuristic
from support.devices import draft_on, each_device, model_on, on_gpu
from support.pairwise import pairs_of, pairwise_cases
from support.ties import check_greedy, deviation
from support.tiny import EXTRA_FAMILIES, FAMILIES, plain_greedy, ragged_prompts, tiny_model

NEW = 24  # with prompts of up to 20 tokens, several times the sliding windows of 8
VOCAB = 97

FACTORS = {
    "family": (*FAMILIES, *EXTRA_FAMILIES),
    "policy": (0, 1, 2, 3, 4, 5, 6, 7, 8, "hf", "bass", "auto"),
    "drafter": ("none", "model", "lookup", "table", "exit", "random", "chain"),
    "rows": (1, 3, 8),
    "rule": ("token", "block", "coupled"),
    "attention": ("auto", "pad", "split"),
    "side": ("left", "right"),
}
CASES = pairwise_cases(FACTORS)
# On a GPU every case compiles kernels; forms and padding are the same code there, and fewer lengths tell as much.
GPU_FACTORS = {
    **FACTORS,
    "policy": (0, 4, "auto"),
    "drafter": ("none", "model", "lookup"),
    "rows": (1, 8),
    "side": ("left",),
}
EVERYWHERE = [
    *(pytest.param("cpu", case, id="-".join(map(str, case.values()))) for case in CASES),
    *(
        pytest.param("cuda", case, id="-".join(map(str, ("cuda", *case.values()))), marks=on_gpu)
        for case in pairwise_cases(GPU_FACTORS)
    ),
]


@lru_cache
def prompts_of(family: str) -> list[list[int]]:
    return ragged_prompts(8, VOCAB, seed=len(family))


@lru_cache
def oracle(family: str, device: str = "cpu") -> tuple[list[list[int]], float]:
    """Plain decoding of each prompt alone, and the model's own numerical noise."""
    model, prompts = model_on(family, device), prompts_of(family)
    wanted = [plain_greedy(model, prompt, NEW) for prompt in prompts]
    return wanted, deviation(model, [*prompts[1], *wanted[1]])


@lru_cache
def table(family: str, device: str) -> forerun.NgramTable:
    wanted, _ = oracle(family, device)
    texts = [[*prompt, *output] for prompt, output in zip(prompts_of(family), wanted, strict=True)]
    return forerun.NgramTable.count(texts[::2], vocab_size=VOCAB)  # half of the answers: some drafts hold, some do not


def make_drafter(name: str, family: str, device: str = "cpu") -> Any:
    makers = {
        "none": lambda: None,
        "model": lambda: forerun.DraftModel(draft_on(family, device)),
        "lookup": lambda: forerun.PromptLookup(),
        "table": lambda: table(family, device),
        "exit": lambda: forerun.EarlyExit(1),
        "random": lambda: forerun.RandomDraft(),
        "chain": lambda: forerun.Chain(forerun.PromptLookup(min_ngram=2), forerun.DraftModel(draft_on(family, device))),
    }
    return makers[name]()


def make_policy(name: str | int) -> Any:
    return (
        {"hf": HfHeuristic(), "bass": BassHeuristic(), "auto": "auto"}[name]
        if isinstance(name, str)
        else Constant(name)
    )


def padded(prompts: list[list[int]], side: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Pads are real token ids, so that a pad that is read as text changes the answer."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), 7)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids.to(device), mask.to(device)


@pytest.mark.parametrize(("device", "case"), EVERYWHERE)
@pytest.mark.quick(every=6)
def test_greedy_equals_generate(device: str, case: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    family = case["family"]
    model, wanted, noise = model_on(family, device), *oracle(family, device)
    drafter = make_drafter(case["drafter"], family, device)
    how = {"policy": make_policy(case["policy"]), "rule": case["rule"], "attention": case["attention"]}
    decoder = forerun.SpeculativeDecoder(model, drafter, **how, compile=False)  # graphs have tests of their own
    prompts = prompts_of(family)[-case["rows"] :]
    out = decoder.generate(*padded(prompts, case["side"], device), max_new_tokens=NEW)
    assert not [w for w in recwarn if issubclass(w.category, ForerunWarning)], "a drafter failed"
    for row, prompt in enumerate(prompts):
        check_greedy(model, prompt, out.new_tokens[row], wanted[row - case["rows"]], noise, f"{case} row {row}")


@each_device
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_kept_in_every_family(family: str, device: str) -> None:
    """Identity would also hold if nothing were ever accepted: a good draft must really save rounds."""
    model = model_on(family, device)
    decoder = forerun.SpeculativeDecoder(model, forerun.DraftModel(model), policy=4, compile=False)
    out = decoder.generate(*padded(prompts_of(family), "left", device), max_new_tokens=NEW)
    assert out.stats.acceptance_rate > 0.99
    assert all(row.stats.rounds == -(-NEW // 5) for row in out.rows)


def test_pairs_are_all_there() -> None:
    seen = {pair for case in CASES for pair in pairs_of(case)}
    wanted = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    assert seen == wanted
    assert len(CASES) < 1.3 * len(FACTORS["family"]) * len(FACTORS["policy"])


def test_a_wrong_token_is_no_tie() -> None:
    """The negative control of the tie rule."""
    model, (wanted, noise) = tiny_model("llama"), oracle("llama")
    prompt = prompts_of("llama")[1]
    wrong = [*wanted[1][:5], (wanted[1][5] + 1) % VOCAB, *wanted[1][6:]]
    with pytest.raises(AssertionError, match="token 5"):
        check_greedy(model, prompt, wrong, wanted[1], noise)
    with pytest.raises(AssertionError, match="instead of"):
        check_greedy(model, prompt, wanted[1][:-1], wanted[1], noise)
    assert noise < 1e-4
