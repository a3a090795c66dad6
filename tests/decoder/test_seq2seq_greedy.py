"""Greedy output of encoder-decoder models is `model.generate`'s: every family, drafter, rule, batch and form."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import forerun
from support.pairwise import pairwise_cases
from support.seq2seq import VOCAB, batch_of, generated, recomputed, rows_of
from support.tiny import EXTRA_SEQ2SEQ, SEQ2SEQ_FAMILIES, draft_of, tiny_model
from support.warned import forerun_warnings

NEW = 20
FACTORS = {
    "family": SEQ2SEQ_FAMILIES,
    "drafter": ("none", "model", "shared", "lookup", "table", "exit", "random", "chain", "tree", "causal"),
    "policy": (1, 3, 6, "auto"),
    "rows": (1, 3, 8),
    "rule": ("token", "block", "coupled"),
    "attention": ("auto", "pad", "split"),
    "side": ("left", "right"),
}
CASES = [case | ({"rule": "token"} if case["drafter"] == "tree" else {}) for case in pairwise_cases(FACTORS)]
CASES += [{**CASES[1], "family": family, "drafter": "shared", "policy": 3, "rows": 8} for family in EXTRA_SEQ2SEQ]


@lru_cache
def oracle(family: str) -> list[list[int]]:
    """Plain decoding of each source alone, the decoder's start token in front."""
    model = tiny_model(family)
    return [generated(model, batch_of(family, [row]), max_new_tokens=NEW)[0].tolist() for row in rows_of(family)]


@lru_cache
def draft_model(family: str) -> Any:
    return draft_of(tiny_model(family))


def make_drafter(name: str, family: str) -> Any:
    makers = {
        "none": lambda: None,
        "model": lambda: forerun.DraftModel(draft_model(family)),
        "shared": lambda: forerun.DraftModel(draft_model(family), shares_encoder=True),
        "lookup": lambda: forerun.PromptLookup(),
        "table": lambda: forerun.NgramTable.count(oracle(family)[::2], vocab_size=VOCAB),
        "exit": lambda: forerun.EarlyExit(1),
        "random": lambda: forerun.RandomDraft(),
        "chain": lambda: forerun.Chain(forerun.PromptLookup(min_ngram=2), forerun.DraftModel(draft_model(family))),
        "tree": lambda: forerun.Tree(forerun.DraftModel(draft_model(family), shares_encoder=True), nodes=6),
        "causal": lambda: forerun.DraftModel(tiny_model("llama")),  # guesses from the decoder's text alone
    }
    return makers[name]()


def check_greedy(family: str, row: int, got: list[int], wanted: list[int]) -> None:
    """Equal, or parted where the model itself finds two tokens as good as each other."""
    if got == wanted:
        return
    place = next(i for i, (g, w) in enumerate(zip(got, wanted, strict=True)) if g != w)
    logits = recomputed(tiny_model(family), family, rows_of(family)[row], wanted[:place])[-1]
    gap = float(logits.max() - logits[got[place]])
    assert gap < 1e-4, f"row {row}, token {place}: {got[place]} instead of {wanted[place]}, gap {gap:.2g}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.quick(every=29)
def test_greedy_equals_generate(case: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    family, count = case["family"], case["rows"]
    decoder = forerun.SpeculativeDecoder(
        tiny_model(family),
        make_drafter(case["drafter"], family),
        policy=case["policy"],
        rule=case["rule"],
        attention=case["attention"],
    )
    out = decoder.generate(**batch_of(family, rows_of(family)[-count:], case["side"]), max_new_tokens=NEW)
    assert not forerun_warnings(recwarn), "a drafter failed"
    for i, row in enumerate(range(8 - count, 8)):
        check_greedy(family, row, out.sequences[i].tolist(), oracle(family)[row])


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
@pytest.mark.parametrize("shares_encoder", (False, True))
@pytest.mark.quick(every=3)
def test_good_drafts_are_kept(family: str, shares_encoder: bool) -> None:
    """Identity would also hold if nothing were ever accepted."""
    drafter = forerun.DraftModel(tiny_model(family), shares_encoder=shares_encoder)
    decoder = forerun.SpeculativeDecoder(tiny_model(family), drafter, policy=4)
    out = decoder.generate(**batch_of(family, rows_of(family)), max_new_tokens=NEW)
    assert out.stats.acceptance_rate > 0.99
    assert decoder.engine.target.encoder.calls == 1
    assert decoder.drafter.scorer.encoder.calls == (0 if shares_encoder else 1)


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_fixtures_depend_on_their_source_and_go_on(family: str) -> None:
    """A comparison of texts is worth little where all sources get the same one, or one token again and again."""
    texts = oracle(family)
    assert len({tuple(text) for text in texts}) >= 7
    assert sum(len(set(text)) for text in texts) / len(texts) > NEW / 3


def test_a_wrong_token_is_no_tie() -> None:
    wanted = oracle("bart")[1]
    with pytest.raises(AssertionError, match="token 5"):
        check_greedy("bart", 1, [*wanted[:5], (wanted[5] + 1) % VOCAB, *wanted[6:]], wanted)


def test_left_padding_is_as_good_as_none() -> None:
    """transformers' BART reads other positions when its input is padded on the left; here a row is a row."""
    model, rows = tiny_model("bart"), rows_of("bart")
    padded = batch_of("bart", rows, "left")
    out = forerun.SpeculativeDecoder(model, None).generate(**padded, max_new_tokens=NEW)
    assert out.sequences.tolist() == oracle("bart")
    assert not torch.equal(generated(model, padded, max_new_tokens=NEW), out.sequences)
