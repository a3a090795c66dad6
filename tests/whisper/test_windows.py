"""Whisper's `generate` with our windows inside says what it says by itself, token for token and second for second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import forerun
from forerun.check.chi_square import fit
from forerun.errors import InvalidArgument
from forerun.whisper import Hearing, Windows
from support.sound import babble
from support.tiny import draft_of
from support.whisper import END, FIRST_TIME, LENGTH, NO_TIMES, START, VOCAB, Processor, tiny_whisper

PROCESSOR = Processor()
SHORT = (0.4, 1.0, 0.8, 0.1, 0.9, 0.5, 0.7, 0.3)
LONG = (1.4, 2.3, 2.9, 1.2)


def heard(lengths: tuple[float, ...], seed: int = 0) -> dict[str, Tensor]:
    sounds = [babble(seconds, seed + place) for place, seconds in enumerate(lengths)]
    how: dict[str, Any] = {"truncation": False, "padding": "longest"} if max(lengths) > 1 else {}
    made = PROCESSOR.feature_extractor(
        sounds, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **how
    )
    return {"input_features": made.input_features, "attention_mask": made.attention_mask}


def windows(model: Any, drafter: Any = "draft", **settings: Any) -> Windows:
    drafter = forerun.DraftModel(draft_of(model), shares_encoder=True) if drafter == "draft" else drafter
    settings.setdefault("policy", 3)
    return Windows(forerun.SpeculativeDecoder(model, drafter, **settings).engine, seed=1)


def said(made: Any) -> list[list[tuple[float, float, list[int]]]]:
    return [[(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in row] for row in made["segments"]]


def both(model: Any, inputs: dict[str, Tensor], inside: Windows, **keywords: Any) -> tuple[Any, Any]:
    if not keywords.get("return_timestamps"):  # asked for none, a random model gives some, and may never get on
        keywords["suppress_tokens"] = [*model.generation_config.suppress_tokens, *range(FIRST_TIME, VOCAB)]
    theirs = said(model.generate(**inputs, return_segments=True, **keywords))
    return theirs, said(model.generate(**inputs, return_segments=True, custom_generate=inside, **keywords))


JUDGED: dict[str, Any] = {"logprob_threshold": -1.5, "compression_ratio_threshold": 1.35, "no_speech_threshold": 0.02}
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "one": (SHORT[:1], {}),
    "three": (SHORT[:3], {}),
    "eight": (SHORT, {}),
    "timed one": (SHORT[:1], {"return_timestamps": True}),
    "timed eight": (SHORT, {"return_timestamps": True}),
    "long one": (LONG[2:3], {"return_timestamps": True}),
    "long four": (LONG, {"return_timestamps": True}),
    "long, text before": (LONG, {"return_timestamps": True, "condition_on_prev_tokens": True}),
    "judged": (SHORT[:3], {"temperature": 0.0, **JUDGED}),
    "judged, timed": (SHORT[:3], {"temperature": 0.0, "return_timestamps": True, **JUDGED}),
    "judged, long": (LONG, {"temperature": 0.0, "return_timestamps": True, "condition_on_prev_tokens": True, **JUDGED}),
    "short budget": (SHORT[:3], {"max_new_tokens": 5}),
    "prompted": (SHORT[:3], {"prompt_ids": torch.tensor([46, 3, 4, 5])}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_transcripts_are_transformers_own(name: str, seed: int) -> None:
    lengths, keywords = CASES[name]
    model = tiny_whisper(seed)
    inside = windows(model)
    theirs, ours = both(model, heard(lengths, seed), inside, **keywords)
    assert ours == theirs
    assert inside.stats.num_accepted_tokens > 0, "nothing was drafted, so nothing was tested"
