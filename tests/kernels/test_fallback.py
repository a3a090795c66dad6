"""A kernel that cannot be built is told of once, and its reference gives the same from then on."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from engine.device_engines import CUT, SAMPLED, engine, requests, texts
from forerun import ops
from forerun.config import Kernels
from forerun.errors import ForerunWarning
from forerun.kernels import fallback, why_not_numba
from forerun.kernels import scaled as scaled_kernels
from forerun.kernels.scaled import ScaledWeight, product
from forerun.math import scaled
from forerun.models.bodies import choose
from forerun.models.scorer import Scorer
from support.recompute import check, recomputed
from support.tiny import tiny_model
from support.warned import forerun_warnings

needs_numba = pytest.mark.skipif(why_not_numba() is not None, reason="no compiled kernels here")
RUNS = {"attend_across", "attend_ragged", "write", "rotate_and_write", "verify", "verify_tree", "sample",
        "draft_ngrams", "draft_uniforms", "draft_lengths", "lay_out", "advance", "adjust", "adjust_rows", "linear",
        "prefers_own_linear"}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_refused_yet() -> Iterator[None]:
    fallback.refused.clear()
    yield
    fallback.refused.clear()


class Broken:
    """Stands in for a compiled kernel; like a broken one it fails before it has written anything."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __getitem__(self, grid: Any) -> Broken:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise self.error


def of_triton() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


def of_numba() -> Exception:
    from numba.core.errors import LoweringError

    return LoweringError("no such instruction")


def test_every_choice_by_use_falls_back() -> None:
    chosen = {name for name, function in inspect.getmembers(ops, inspect.isfunction)
              if function.__module__ == ops.__name__ and not name.startswith(("_", "why_not"))
              and "use" in inspect.signature(function).parameters}  # fmt: skip
    assert chosen == RUNS
    assert all(hasattr(getattr(ops, name), "__wrapped__") for name in chosen)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels run here, as on a GPU."""
    pytest.importorskip("support.triton_cpu")
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: use is not Kernels.OFF)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("on_device", (False, True))
def test_rounds_whose_verification_cannot_be_built(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.kernels.verify import job

    broken = Broken(of_triton())
    monkeypatch.setattr(job, "sum_kernel", broken)
    asked = requests(2, [SAMPLED, CUT], new=6)
    want = texts(engine(False, policy=2), asked)
    made = engine(on_device, policy=2)
    made.target.kernels = Kernels.AUTO
    with pytest.warns(ForerunWarning, match="kernel of 'verify' could not be built.*its reference runs") as caught:
        assert texts(made, asked) == want
    assert fallback.refused == {"sample", "verify"}, "drafts are drawn with the same kernel"
    assert len(forerun_warnings(caught)) == broken.calls == 2, "each is told of and tried once"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        assert texts(made, asked) == want


@needs_numba
@pytest.mark.quick("on", "auto")
@pytest.mark.parametrize("use", (Kernels.ON, Kernels.AUTO))
def test_linear_layers_of_a_family_that_is_not_fused(use: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.kernels.cpu import choice, linear, measured

    broken = Broken(of_numba())
    monkeypatch.setattr(linear, "_linear", broken)
    monkeypatch.setattr(choice, "_wins", lambda shape, threads: choice.compare(shape, threads))  # nothing on disk
    monkeypatch.setattr(measured, "PATIENCE", 0.0)
    model = copy.deepcopy(tiny_model("opt"))
    choose.refuse(model)
    with pytest.warns(ForerunWarning, match="could not be built.*no such instruction") as caught:
        scorer = Scorer(model, use=use)
        scorer.admit(0)
        got = scorer.score([0], [[5, 9, 3, 60]])
    assert not scorer.is_fused and broken.calls == len(forerun_warnings(caught)) == 1
    check(got, recomputed(model, [5, 9, 3, 60]))


@needs_numba
def test_fused_layers_that_fail_while_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    monkeypatch.setattr(choose, "measured", lambda model: (_ for _ in ()).throw(of_numba()))
    with pytest.warns(ForerunWarning, match="fused layers of LlamaForCausalLM could not be built"):
        scorer = Scorer(model, use=Kernels.AUTO)
    assert not scorer.is_fused
    scorer.admit(0)
    check(scorer.score([0], [[5, 9, 3]]), recomputed(model, [5, 9, 3]))


@needs_numba
def test_another_error_of_a_kernel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.kernels.cpu import linear

    monkeypatch.setattr(linear, "_linear", Broken(RuntimeError("an address that is none")))
    with pytest.raises(RuntimeError, match="an address"):
        ops.linear(torch.zeros(1, 32), torch.zeros(8, 32), None, Kernels.ON)
    assert not fallback.refused


@needs_numba
def test_a_compiler_of_the_users_own_refuses_nothing() -> None:
    class Theirs(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            raise of_numba()

    @fallback.or_reference
    def adjusted(logits: Tensor, use: Kernels = Kernels.AUTO) -> Tensor:
        return Theirs()(logits, logits)

    with pytest.raises(Exception, match="no such instruction"):
        adjusted(torch.zeros(1, 4))
    assert not fallback.refused


def test_a_product_of_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("support.triton_cpu")
    from forerun.kernels.linear import project

    torch.manual_seed(0)
    rounded = scaled.rounded_weight(torch.randn(16, 64), scaled.INT8, torch.float32)
    weight, x = ScaledWeight(*rounded, scaled.INT8, torch.float32), torch.randn(2, 64)
    want = product(x, weight, None, Kernels.OFF)
    broken = Broken(of_triton())
    monkeypatch.setattr(scaled_kernels, "why_not_triton", lambda device: None)
    monkeypatch.setattr(project, "why_not", lambda *_: None)
    monkeypatch.setattr(project, "project", broken)
    with pytest.warns(ForerunWarning, match="kernel of 'product' could not be built"):
        assert torch.equal(product(x, weight), want)
    assert torch.equal(product(x, weight), want) and broken.calls == 1
