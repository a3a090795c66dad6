"""The joint law of families whose layers are described, one of each kind, through the fused layers of each device."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from pytest import MonkeyPatch

pytest.importorskip("numba")

from exactness import controls
from exactness.sampling import verdict
from forerun import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.models.bodies import readers
from forerun.models.bodies.description import Decoder
from forerun.types import Rule
from support.described import described_model
from support.interpreter import on_gpu_alone
from support.markov import DRAFT_NOISE, joint_law, softmax_at
from support.tiny import draft_of

COPIES, PROMPT, VOCAB = 256, (1, 2, 0, 1, 2), 3
TEMPERATURE = 2.0  # keeps most cells of the law likely enough to count
# Soft caps and windows; a plain MLP in turn; ALiBi; experts; latent attention; sinks; neighbours that turn together and
# an MLP beside attention; learned positions.
KINDS = [
    ("gemma2", Rule.TOKEN), ("gpt_neox", Rule.BLOCK), ("bloom", Rule.COUPLED), ("qwen2_moe", Rule.TOKEN),
    ("deepseek_v3", Rule.BLOCK), ("gpt_oss", Rule.BLOCK), ("gptj", Rule.TOKEN), ("gpt2", Rule.BLOCK),
]  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu_alone])]


def misfit_of(family: str, rule: Rule, device: str = "cpu") -> str:
    on_cpu = described_model(family, vocab_size=VOCAB)
    model = copy.deepcopy(on_cpu).to(device)
    draft = DraftModel(draft_of(model, DRAFT_NOISE))
    # So few tokens are too few for the self-check, which has a test of its own for every family.
    decoder = SpeculativeDecoder(model, draft, policy=3, rule=rule, kernels="on", self_check=False)
    assert decoder.engine.target.is_fused
    samples: list[list[int]] = []
    for seed in range(3):
        out = decoder.generate(
            [list(PROMPT)], max_new_tokens=4, temperature=TEMPERATURE, seed=seed, num_return_sequences=COPIES
        )
        samples += out.new_tokens
    assert out.stats.num_accepted_tokens > 0
    return verdict(samples, joint_law(on_cpu, PROMPT, 3, softmax_at(TEMPERATURE)))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "rule"), KINDS)
def test_joint_law(family: str, rule: Rule, device: str) -> None:
    assert misfit_of(family, rule, device) == ""


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family, rule in KINDS if rule is not Rule.COUPLED])
def test_control_wrong_correction_is_noticed(family: str, monkeypatch: MonkeyPatch) -> None:
    """On the CPU alone: a GPU's kernels draw corrections themselves."""
    controls.correct_from_target(monkeypatch)
    assert misfit_of(family, Rule.TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [family for family, _ in KINDS if family != "deepseek_v3"])
def test_control_layers_that_see_two_keys_are_noticed(family: str, device: str, monkeypatch: MonkeyPatch) -> None:
    """Tokens stay plausible and the loop is untouched: only the law can tell."""
    right = readers.describe

    def short_sighted(model: object) -> Decoder:
        decoder = right(model)  # type: ignore[arg-type]
        layers = (replace(layer, attention=replace(layer.attention, window=2)) for layer in decoder.layers)
        return replace(decoder, layers=tuple(layers))

    monkeypatch.setattr(readers, "describe", short_sighted)
    assert misfit_of(family, Rule.TOKEN, device)
