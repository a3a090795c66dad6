"""Greedy output is the output of `model.generate(do_sample=False)`: every family, drafter, policy, rule and form."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

import forerun
from decoder.greedy import NEW, VOCAB, make_drafter, make_policy, oracle, prompts_of
from support.batches import padded
from support.devices import each_device, model_on, on_gpu
from support.pairwise import pairs_of, pairwise_cases
from support.ties import check_greedy
from support.tiny import EXTRA_FAMILIES, FAMILIES, tiny_model
from support.warned import forerun_warnings

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


@pytest.mark.parametrize(("device", "case"), EVERYWHERE)
@pytest.mark.quick(every=45)
def test_greedy_equals_generate(device: str, case: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    family = case["family"]
    model, wanted, noise = model_on(family, device), *oracle(family, device)
    drafter = make_drafter(case["drafter"], family, device)
    how = {"policy": make_policy(case["policy"]), "rule": case["rule"], "attention": case["attention"]}
    decoder = forerun.SpeculativeDecoder(model, drafter, **how, compile=False)  # graphs have tests of their own
    prompts = prompts_of(family)[-case["rows"] :]
    out = decoder.generate(*padded(prompts, case["side"], device), max_new_tokens=NEW)
    assert not forerun_warnings(recwarn), "a drafter failed"
    for row, prompt in enumerate(prompts):
        check_greedy(model, prompt, out.new_tokens[row], wanted[row - case["rows"]], noise, f"{case} row {row}")


@pytest.mark.quick(every=3)
@each_device
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_kept_in_every_family(family: str, device: str) -> None:
    """Identity would also hold if nothing were ever accepted: a good draft must really save rounds."""
    model = model_on(family, device)
    decoder = forerun.SpeculativeDecoder(model, forerun.DraftModel(model), policy=4, compile=False)
    out = decoder.generate(*padded(prompts_of(family), "left", device), max_new_tokens=NEW)
    assert out.stats.acceptance_rate > 0.99
    first = int(decoder.engine.first_from_prompt)  # a round of its own, without a draft
    assert all(row.stats.rounds == first - (first - NEW) // 5 for row in out.rows)


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
