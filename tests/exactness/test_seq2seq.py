"""Encoder-decoder models through the whole loop: the joint law of what is said, row by row with its own source."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from exactness import controls
from exactness.sampling import PLAIN, verdict
from exactness.sourced import PROMPTS, SOFTEN, START, STEPS, given, law, make_drafter, pair, sources
from forerun import SpeculativeDecoder
from forerun.config import SamplingParams
from forerun.decode import speculative_decode
from forerun.drafters import Chain, DraftModel, EarlyExit, PromptLookup
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.models import cross_attention
from forerun.models.patches import positions
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Rule, Source
from support.finish import finished
from support.seq2seq import batch_of, source_of
from support.tiny import draft_of, tiny_model

COPIES = 384


def misfits(family: str, drafter: str, rule: str = "token", attention: str = "auto") -> list[str]:
    """Three sources of different lengths, many copies of each, side by side."""
    target = copy.deepcopy(pair(family)[0])
    decoder = SpeculativeDecoder(target, make_drafter(drafter, family), policy=2, rule=rule, attention=attention)
    begin = batch_of("t5", [torch.tensor(prompt) for prompt in PROMPTS], "left")
    out = decoder.generate(
        **given(family, range(3)),
        decoder_input_ids=begin["input_ids"],
        decoder_attention_mask=begin["attention_mask"],
        decoder_start_token_id=PROMPTS[1][0],
        max_new_tokens=STEPS + 1,
        temperature=1.0,
        seed=4,
        num_return_sequences=COPIES,
    )
    samples = [out.new_tokens[i * COPIES : (i + 1) * COPIES] for i in range(3)]
    return [verdict(found, law(family, row)) for row, found in enumerate(samples)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafter", "rule", "attention"),
    [
        ("t5_gated", "model", "token", "pad"),
        ("t5_gated", "tree", "token", "auto"),
        ("mbart", "shared", "block", "pad"),
        ("mbart", "exit", "token", "split"),
        ("whisper", "shared", "token", "auto"),
        ("whisper", "chain", "coupled", "pad"),
    ],
)
def test_joint_law(family: str, drafter: str, rule: str, attention: str) -> None:
    assert misfits(family, drafter, rule, attention) == ["", "", ""]


def test_laws_of_different_sources_differ() -> None:
    """Else a row that reads its neighbour's source would say nothing wrong."""
    for family in SOFTEN:
        distances = [float((law(family, a) - law(family, b)).abs().sum()) / 2 for a, b in ((0, 1), (1, 2), (0, 2))]
        assert min(distances) > 0.15, (family, distances)


@pytest.mark.slow
def test_control_wrong_correction(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert any(misfits("mbart", "shared"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ("t5_gated", "whisper"))
def test_control_a_neighbours_source(family: str, monkeypatch: MonkeyPatch) -> None:
    """Numbers are given to sources in order: each row looks up its neighbour's."""
    right = cross_attention.Sources.of

    def next_one(self: cross_attention.Sources, row: int) -> Source:
        known = list(self._number)
        return known[(known.index(right(self, row)) + 1) % len(known)]

    monkeypatch.setattr(cross_attention.Sources, "of", next_one)
    assert all(misfits(family, "shared"))


@pytest.mark.slow
def test_control_bias_of_the_longest_row(monkeypatch: MonkeyPatch) -> None:
    """T5's distances counted from the longest past of the batch: rows of different length are then wrong."""

    def shifted(module: Any, states: Any) -> Any:
        late = copy.copy(states)
        late.positions = torch.full_like(states.positions, int(states.positions.max()))
        return right(module, late)

    right = positions._bias
    monkeypatch.setattr(positions, "_bias", shifted)
    assert any(misfits("t5_gated", "model"))


@pytest.mark.quick("token-shared")
@pytest.mark.parametrize("kind", ("shared", "exit", "chain"))
@pytest.mark.parametrize("rule", Rule)
def test_the_engine_says_what_the_specification_says(kind: str, rule: Rule) -> None:
    """`decode.py` reads a source with one line more; beside others the engine says the same, token for token."""
    model = tiny_model("bart", vocab=29)
    texts = [Source(ids=(5, 6, 7, 5, 6)), Source(ids=(9, 3)), Source(ids=(11, 12, 13, 14, 15, 16, 17))]

    def drafter(target: Seq2SeqScorer) -> Drafter:
        draft = draft_of(model, 0.1)
        made: Drafter = {
            "shared": DraftModel(draft, shares_encoder=True),
            "exit": EarlyExit(1),
            "chain": Chain(PromptLookup(min_ngram=2), DraftModel(draft)),
        }[kind]
        made.bind(target)  # type: ignore[attr-defined]
        return made

    target = Seq2SeqScorer(model)
    book = speculative_decode(
        target, drafter(target), START, draft_length=3, max_new_tokens=16, params=PLAIN, rule=rule, seed=5,
        request_id=0, source=texts[0],
    )  # fmt: skip
    expected = [token for tokens in book for token in tokens]
    target = Seq2SeqScorer(model)
    engine = Engine(target, drafter(target), Constant(3), rule=rule)
    for i, source in enumerate(texts):
        params = PLAIN if i != 1 else SamplingParams()
        engine.add(Request(prompt=START, source=source, max_new_tokens=16, params=params, seed=5, request_id=i))
    said = {result.request.request_id: list(result.tokens) for result in finished(engine)}
    assert said[0] == expected
    assert len({tuple(tokens) for tokens in said.values()}) == 3


@pytest.mark.quick("coupled-bart")
@pytest.mark.parametrize("family", ("t5_gated", "bart", "whisper"))
@pytest.mark.parametrize("rule", ("token", "coupled"))
def test_a_rows_tokens_are_its_own(family: str, rule: str) -> None:
    """Alone, in any batch, in any order."""
    model = tiny_model(family)
    rows = [*sources("whisper"), *torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(6))]
    if family != "whisper":
        rows = [torch.tensor(ids) for ids in ([5, 6, 7], [8] * 12, [1, 2], [40, 41, 42, 43, 44], [9])]
    decoder = SpeculativeDecoder(model, DraftModel(draft_of(model), shares_encoder=True), policy=3, rule=rule)
    said: dict[int, list[int]] = {}
    for order in ([0], [3, 0], [4, 3, 2, 1, 0], [1, 2], [2, 0, 4, 1]):
        out = decoder.generate(
            **batch_of(family, [rows[i] for i in order]), max_new_tokens=16, temperature=0.9, seed=3,
            request_ids=[50 + i for i in order],
        )  # fmt: skip
        for i, tokens in zip(order, out.new_tokens, strict=True):
            assert said.setdefault(i, tokens) == tokens
    assert len({tuple(tokens) for tokens in said.values()}) == 5
    assert {source_of(row) for row in rows}
