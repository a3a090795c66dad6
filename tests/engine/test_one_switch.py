"""Whether kernels are used is one choice for all of a round: passes, draws, penalties, judgements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forerun
from engine.device_engines import engine, requests, texts
from forerun import kernels, ops
from forerun.config import Kernels
from forerun.config import kernels as choice
from forerun.drafters import Tree
from forerun.errors import InvalidArgument
from support.tiny import draft_of, ragged_prompts, tiny_model

Uses = list[Kernels | None]
ON_A_GPU: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uses]:
    """What everybody who could have had a kernel said about it."""
    seen: Uses = []
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: bool(seen.append(use)))
    yield seen


def decode(decoder: forerun.SpeculativeDecoder, **settings: Any) -> None:
    ids = torch.tensor(ragged_prompts(1, 97, 0))
    decoder.generate(ids, max_new_tokens=8, temperature=0.8, seed=1, **settings)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "drafter",
    (
        forerun.DraftModel,
        lambda draft: forerun.Chain(forerun.DraftModel(draft)),
        lambda draft: Tree(forerun.DraftModel(draft), nodes=6),
    ),
    ids=("draft-model", "chain", "tree"),
)
@pytest.mark.parametrize("use", ("off", "auto"))
def test_the_decoders_argument_wins(
    drafter: Callable[[Any], Any], use: str, asked: Uses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a variable that cannot be read without an error: nobody looks at it."""
    model = tiny_model("gpt_neox")
    guesser = drafter(draft_of(model))
    monkeypatch.setenv("FORERUN_KERNELS", "nonsense")
    decoder = forerun.SpeculativeDecoder(model, guesser, policy=3, kernels=use)
    decode(decoder, repetition_penalty=1.1)
    assert len(asked) > 20 and set(asked) == {Kernels(use)}


def test_the_environment_is_the_default(asked: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was when the decoder was made: passes, draws and judgements of one decoder never part."""
    model = tiny_model("gpt_neox")
    monkeypatch.setenv("FORERUN_KERNELS", "on")
    decoder = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), policy=3)
    monkeypatch.setenv("FORERUN_KERNELS", "off")
    decode(decoder)
    assert decoder.engine.target.kernels is Kernels.ON
    assert len(asked) > 5 and set(asked) == {Kernels.ON}


def test_recorded_rounds_follow_their_target(asked: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(True)
    monkeypatch.setenv("FORERUN_KERNELS", "nonsense")
    texts(made, requests(2))
    assert len(asked) > 20 and set(asked) == {made.target.kernels}


@pytest.mark.parametrize(
    ("environment", "use", "wanted"),
    (
        ("off", None, False), ("auto", None, True), ("on", None, True), (None, None, True), (None, Kernels.OFF, False),
        ("off", Kernels.AUTO, True), ("off", Kernels.ON, True), ("auto", Kernels.OFF, False),
    ),
)  # fmt: skip
def test_which_of_the_two(
    environment: str | None, use: Kernels | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_not_triton", lambda device: None)
    if environment is None:
        monkeypatch.delenv("FORERUN_KERNELS", raising=False)
    else:
        monkeypatch.setenv("FORERUN_KERNELS", environment)
    assert ops._on_gpu(ON_A_GPU, use) is wanted


def test_a_variable_that_says_nothing_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "fast")
    with pytest.raises(InvalidArgument, match="FORERUN_KERNELS='fast': choose one of auto, on, off"):
        choice()
    assert choice(Kernels.OFF) is Kernels.OFF
