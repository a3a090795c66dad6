"""Whisper's decoder in one compiled call against transformers' modules: logits of ragged rows, text, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

import forerun
from forerun.config import Kernels
from forerun.kernels.cpu import measured
from forerun.loading.quantise import quantise
from forerun.models.bodies import choose, whisper
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source
from support.whisper import NO_TIMES, START, STEPS, VOCAB, tiny_whisper


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_whisper()


def test_timings_are_of_weights_that_are_stored_alike(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(measured, "remembered", lambda key, measure: asked.append(key) or {})
    other = copy.deepcopy(model)
    other.config.decoder_attention_heads //= 2
    rounded = copy.deepcopy(model)
    quantise(rounded, "int8", "tiny", without=rounded.get_encoder())
    assert whisper.why_not(rounded) is None
    for each in (model, copy.deepcopy(model), other, rounded):
        choose.measured_whisper(each)
    same, again, heads, int8 = asked
    assert same == again and len({same, heads, int8}) == 3


def sound(row: int) -> Source:
    """Sources of different lengths: states as they are, without an encoder."""
    generator = torch.Generator().manual_seed(row)
    return Source(states=torch.randn(STEPS - 7 * row, 32, generator=generator))


def scores(model: Any, use: Kernels, rows: int = 3) -> list[torch.Tensor]:
    """Logits of two ragged passes, a row cut back in between."""
    scorer = Seq2SeqScorer(model, use=use)
    assert scorer.is_fused == (use is Kernels.ON)
    generator = torch.Generator().manual_seed(9)
    words = torch.randint(VOCAB, (40,), generator=generator).tolist()
    for row in range(rows):
        scorer.admit(row)
        scorer.read(row, sound(row))
    scorer.feed(range(rows), [words[: 2 + 3 * row] for row in range(rows)])
    first = scorer.score(range(rows), [words[:5], words[3:4], words[:6]][:rows])
    scorer.rewind([0], [3])
    second = scorer.score([2, 0][:rows], [words[7:9], words[1:5]][:rows])
    return [first, second]


@pytest.mark.slow
def test_logits_are_the_modules(model: Any) -> None:
    for fused, plain in zip(scores(model, Kernels.ON), scores(model, Kernels.OFF), strict=True):
        torch.testing.assert_close(fused, plain, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["self_attn.v_proj", "encoder_attn.q_proj", "fc1"])
@pytest.mark.slow
def test_every_part_is_looked_at(model: Any, part: str) -> None:
    """A control: with one bias changed, the two part."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.decoder.layers[0].get_submodule(part).bias += 0.3
    fused, plain = scores(model, Kernels.ON)[0], scores(changed, Kernels.OFF)[0]
    assert (fused - plain).abs().max() > 1e-2


@pytest.mark.slow
def test_many_tokens_at_once(model: Any) -> None:
    """More than one call's worth, rows cut anywhere."""
    words = torch.randint(VOCAB, (36,), generator=torch.Generator().manual_seed(2)).tolist()
    found = []
    for use in (Kernels.ON, Kernels.OFF):
        scorer = Seq2SeqScorer(model, use=use)
        for row in range(3):
            scorer.admit(row)
            scorer.read(row, sound(row))
        found.append(scorer.score(range(3), [words[:36], words[:20], words[10:36]]))
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["none", "model", "exit"])
@pytest.mark.slow
def test_text_is_that_of_the_modules(model: Any, drafter: str) -> None:
    features = torch.randn(3, 8, 2 * STEPS, generator=torch.Generator().manual_seed(4))
    prefix = torch.tensor([[START, NO_TIMES]]).expand(3, -1)
    texts = []
    for kernels in ("on", "off"):
        made = {
            "none": lambda: None,
            "model": lambda: forerun.DraftModel(copy.deepcopy(model), shares_encoder=True),
            "exit": lambda: forerun.EarlyExit(1),
        }[drafter]()
        decoder = forerun.SpeculativeDecoder(model, made, policy=3, kernels=kernels)
        texts.append(decoder.generate(input_features=features, decoder_input_ids=prefix, max_new_tokens=20))
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()


def test_gelu_keeps_its_digits() -> None:
    """Against float64, relative: torch's own float32 loses all digits below -5 and would be no measure.

    In units of half an ulp: the exponent -x^2 / 2 is rounded four times, which e^x turns into 2 x^2; the polynomial,
    the exponential and the products after it add 16. Fused multiply-adds only make it less.
    """
    from forerun.kernels.cpu.activation import gelus

    x = torch.linspace(-12, 9, 50001)
    found = x.clone()
    gelus(found.numpy())
    exact = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    allowed = (2 * x.double() ** 2 + 16) * 2.0**-24 * exact.abs()
    assert ((found - exact).abs() <= allowed).all()
    torch.testing.assert_close(found, torch.nn.functional.gelu(x), atol=4e-6, rtol=0)  # the same function, at its worst


def test_what_it_does_not_know_is_left_to_the_modules(model: Any) -> None:
    assert whisper.why_not(model) is None
    other = copy.deepcopy(model)
    other.config.activation_function = "relu"
    assert "not a Whisper as published" in str(whisper.why_not(other))
    wrapped = copy.deepcopy(model)
    wrapped.model.decoder.layers[0].fc1.register_forward_hook(lambda *call: None)
    assert "fc1 has forward hooks" in str(whisper.why_not(wrapped))
    assert "float64" in str(whisper.why_not(copy.deepcopy(model).double()))
