"""Compiled kernels behind the face: asked for by keyword, followed by drafters, and no token is another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import forerun
from decoder.greedy import NEW, make_drafter, make_policy, oracle, prompts_of
from forerun import kernels
from forerun.config import Kernels
from forerun.drafters import FeatureHead, ParallelHeads
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.models.bodies import readers
from forerun.models.scorer import Scorer
from support.batches import padded
from support.heads import head_of
from support.pairwise import pairwise_cases
from support.ties import check_greedy
from support.tiny import draft_of, tiny_model

needs_kernels = pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here")

FACTORS = {
    "family": (*readers.PROVEN, "gpt_neox"),  # those whose fused layers no self-check looks at, and one beside
    "drafter": ("none", "model", "lookup", "table", "exit", "random", "chain", "feature", "parallel"),
    "policy": (0, 1, 3, 8, "auto"),
    "rows": (1, 3, 8),
    "rule": ("token", "block", "coupled"),
    "side": ("left", "right"),
}
CASES = pairwise_cases(FACTORS)


def _drafter(name: str, family: str) -> Any:
    if name == "feature":
        return FeatureHead(head_of(tiny_model(family)))
    if name == "parallel":
        return ParallelHeads(head_of(tiny_model(family), 3))
    return make_drafter(name, family)


def _identical(family: str, decoder: forerun.SpeculativeDecoder, rows: int, side: str, label: str) -> Any:
    wanted, noise = oracle(family)
    prompts = prompts_of(family)[-rows:]
    out = decoder.generate(*padded(prompts, side), max_new_tokens=NEW)
    for row, prompt in enumerate(prompts):
        check_greedy(tiny_model(family), prompt, out.new_tokens[row], wanted[row - rows], noise, f"{label} row {row}")
    return out


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.quick(every=19)
def test_greedy_equals_generate(case: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    drafter = _drafter(case["drafter"], case["family"])
    decoder = forerun.SpeculativeDecoder(
        tiny_model(case["family"]), drafter, policy=make_policy(case["policy"]), rule=case["rule"], kernels="on"
    )
    assert decoder.engine.target.is_fused
    _identical(case["family"], decoder, case["rows"], case["side"], str(case))
    assert not [w for w in recwarn if issubclass(w.category, ForerunWarning)], "a drafter failed"


@needs_kernels
def test_control_a_kernel_that_is_a_little_wrong_is_noticed() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None, kernels="on")
    body = decoder.engine.target.body
    assert decoder.engine.target.is_fused
    body._layers["scale"] *= 1.1  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="noise"):
        _identical("llama", decoder, 8, "left", "wrong scale")


@needs_kernels
@pytest.mark.parametrize(("asked", "fused"), [("on", True), (Kernels.ON, True), ("off", False), (None, False)])
def test_the_keyword_decides(asked: Any, fused: bool) -> None:
    """None is what the environment says, which is "off" in these tests."""
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None, kernels=asked)
    assert decoder.engine.target.is_fused == fused


@needs_kernels
def test_without_a_keyword_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "on")
    assert forerun.SpeculativeDecoder(tiny_model("llama"), None).engine.target.is_fused
    assert not forerun.SpeculativeDecoder(tiny_model("llama"), None, kernels="off").engine.target.is_fused


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="kernels='fast': choose one of auto, on, off"):
        forerun.SpeculativeDecoder(tiny_model("llama"), None, kernels="fast")


@needs_kernels
def test_drafters_follow_their_target() -> None:
    model = tiny_model("llama")
    made: list[Any] = [
        forerun.DraftModel(draft_of(model)),
        forerun.EarlyExit(1),
        FeatureHead(head_of(model)),
        forerun.Chain(forerun.PromptLookup(), forerun.DraftModel(draft_of(model))),
    ]
    scorers: tuple[Callable[[Any], Scorer], ...] = (
        lambda bound: bound.scorer,
        lambda bound: bound.scorer,
        lambda bound: bound.trunk.body,
        lambda bound: bound.parts[1].scorer,
    )
    for use in ("on", "off", "on"):
        for drafter, scorer in zip(made, scorers, strict=True):
            found = scorer(forerun.SpeculativeDecoder(model, drafter, kernels=use).drafter)
            assert found.kernels == use, drafter
            assert found.is_fused == (use == "on"), drafter


@needs_kernels
def test_weights_in_training_do_not_disturb_a_score() -> None:
    """A score is not part of anybody's gradient, whichever product the head takes."""
    import copy

    model = copy.deepcopy(tiny_model("llama")).requires_grad_(True)
    for use in Kernels.ON, Kernels.OFF:
        scorer = Scorer(model, use=use)
        scorer.kernels = Kernels.OFF  # the head by torch's product, as `auto` may choose, behind either body
        scorer.admit(0)
        assert not scorer.score([0], [[1, 2, 3]]).requires_grad


PROGRAM = """
import os, sys
{prepare}
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.4, eos_token_id=None)
model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
import forerun
texts = []
for use in ("off", "on", "auto"):
    decoder = forerun.SpeculativeDecoder(model, kernels=use)
    texts.append(decoder.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12).new_tokens)
    body = decoder.engine.target.body
    print(use, getattr(body, "num_threads", None))
assert texts[0] == texts[1] == texts[2], texts
from forerun import kernels
print(kernels.why_not_numba())
"""


def _run(prepare: str, folder: Any) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare)], capture_output=True, text=True,
        env={**_environment(), "FORERUN_CACHE": str(folder)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FORERUN_KERNELS")}


@needs_kernels
@pytest.mark.skipif(not hasattr(__import__("os"), "sched_setaffinity"), reason="cores cannot be taken away here")
@pytest.mark.slow
def test_one_core(tmp_path: Any) -> None:
    off, on, auto, missing = _run("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", tmp_path)
    assert (off, on, missing) == ("off None", "on 1", "None")
    assert auto in ("auto None", "auto 1")


@pytest.mark.slow
def test_without_numba(tmp_path: Any) -> None:
    *uses, missing = _run("sys.modules['numba'] = None", tmp_path)
    assert uses == ["off None", "on None", "auto None"]
    assert "numba" in missing and "pip install" in missing
