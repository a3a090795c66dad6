"""Greedy text of every family whose layers are described: through compiled layers, through modules, by `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

pytest.importorskip("numba")

from forerun import Chain, NgramTable, PromptLookup, SpeculativeDecoder
from support.batches import padded
from support.census import VOCAB
from support.described import NAMES, TEXTS, described_model
from support.ties import check_greedy, deviation
from support.tiny import plain_greedy
from support.warned import forerun_warnings

NEW = 24  # several times the windows of 8
PROMPTS = [[*TEXTS[0], *TEXTS[0][:5]], [*TEXTS[1]] * 3]  # which end as they began, so that there is something to copy


def check_text(model: PreTrainedModel, kernels: Sequence[str], change: Callable[[Any], None] | None = None) -> None:
    """By drafts that copy from the text, or know one of the two."""
    wanted = [plain_greedy(model, prompt, NEW) for prompt in PROMPTS]
    texts = [[*prompt, *new] for prompt, new in zip(PROMPTS, wanted, strict=True)]
    drafter = Chain(PromptLookup(min_ngram=2), NgramTable.count(texts[:1], vocab_size=VOCAB))
    for used in kernels:
        decoder = SpeculativeDecoder(model, drafter, policy=3, kernels=used)
        assert decoder.engine.target.is_fused == (used == "on")
        if change is not None:
            change(decoder.engine.target.body)
        out = decoder.generate(*padded(PROMPTS), max_new_tokens=NEW)
        assert out.stats.num_accepted_tokens > 0
        for row, prompt in enumerate(PROMPTS):
            check_greedy(model, prompt, out.new_tokens[row], wanted[row], deviation(model, texts[row]), f"row {row}")


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.quick("gpt_neox", "deepseek_v3")
def test_greedy_equals_generate(family: str, recwarn: pytest.WarningsRecorder) -> None:
    check_text(described_model(family), ("on", "off"))
    assert not forerun_warnings(recwarn), "the self-check, or a drafter, failed"


def test_control_layers_that_are_a_little_wrong_are_noticed() -> None:
    def change(body: Any) -> None:
        body._layers["scale"] *= 1.1

    with pytest.raises(AssertionError, match="noise"):
        check_text(described_model("gemma2"), ("on",), change)
