"""Every family that fused layers run on a CPU keeps 16-bit weights as they are stored: which of them, and the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

pytest.importorskip("numba")

import forerun
from forerun.config import Kernels
from forerun.kernels.cpu import choice
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.cpu.widen import WIDEST
from forerun.loading import piecewise
from forerun.models.bodies import cpu
from forerun.models.scorer import Scorer
from support.described import NAMES, NEW, TEXTS, described_model, expected, feed
from support.folders import save
from support.recompute import check

QUICK = ("gemma3_text", "gpt2", "falcon-sequential", "qwen2_moe")


@pytest.fixture(autouse=True)
def _narrow_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: True)


def loaded_twice(folder: Path, family: str) -> tuple[Any, Any]:
    """As it is stored, and in float32."""
    save(folder, described_model(family).to(torch.bfloat16))
    kept, plain = (forerun.load(folder, device="cpu", dtype=dtype).model for dtype in ("stored", "float32"))
    if (attention := described_model(family).config._attn_implementation) == "eager":
        for model in (kept, plain):
            model.set_attn_implementation(attention)
    return kept, plain


def logits(model: Any) -> list[Tensor]:
    """Of ragged rows, of several tokens and of one."""
    scorer = Scorer(model, use=Kernels.ON)
    assert scorer.is_fused, cpu.why_not(model)
    feed(scorer)
    several = scorer.score([0, 1], NEW)
    scorer.rewind([0], [len(TEXTS[0])])
    return [several, scorer.score([0], [NEW[0][:1]])]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.quick(*QUICK)
def test_the_bits_of_float32(tmp_path: Path, family: str) -> None:
    kept, plain = loaded_twice(tmp_path, family)
    for (name, mine), theirs in zip(kept.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, theirs), name
    for (name, mine), theirs in zip(kept.named_buffers(), plain.buffers(), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    narrow = {id(weight) for weight in kept.parameters() if isinstance(weight, NarrowWeight)}
    assert len(narrow) >= 2 * 2
    for end in (kept.get_input_embeddings(), kept.get_output_embeddings()):
        assert id(end.weight) in narrow
    assert all(map(torch.equal, logits(kept), logits(plain)))
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(kept(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "phi3", "gpt_neox", "falcon-grouped"])
@pytest.mark.quick("gpt2")
def test_all_products_of_all_layers_are_kept(tmp_path: Path, family: str) -> None:
    """Packed, interleaved and transposed ones, too; tables of positions are not."""
    kept, _ = loaded_twice(tmp_path, family)
    products = [module for module in kept.modules() if isinstance(module, nn.Linear | Conv1D)]
    assert len(products) >= 2 * 4 + 1
    for module in products:
        size = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        assert isinstance(module.weight, NarrowWeight) == (size % WIDEST == 0)
    ends = {id(kept.get_input_embeddings())}
    tables = [module for module in kept.modules() if isinstance(module, nn.Embedding) and id(module) not in ends]
    assert len(tables) == (family == "gpt2")
    assert not any(isinstance(module.weight, NarrowWeight) for module in tables)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "falcon-sequential", "bloom", "phi3", "deepseek_v3"])
@pytest.mark.quick("gpt2")
def test_the_same_weights_are_quantised(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces as from a model that was loaded first, and multiplied by fused layers as by the modules."""
    save(tmp_path, described_model(family))
    model = forerun.load(tmp_path, device="cpu", quantize="int8").model
    with monkeypatch.context() as patch:
        patch.setattr(piecewise.Piecewise, "of_folder", lambda *_: None)
        first = forerun.load(tmp_path, device="cpu", quantize="int8").model
    products = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    rounded = [module for module in products if isinstance(module.weight, NarrowWeight)]
    assert len(rounded) >= len(products) / 2 and {module.weight.format.name for module in rounded} == {"Q8_0"}
    assert model.get_input_embeddings().weight.format.name == "Q8_0"
    for (name, mine), theirs in zip(model.named_parameters(), first.parameters(), strict=True):
        assert type(mine) is type(theirs) and torch.equal(*map(bytes_of, (mine, theirs))), name
    want = expected(model)
    for got, right in zip(logits(model)[0].split([len(new) for new in NEW]), want, strict=True):
        check(got, right)


def bytes_of(weight: Tensor) -> Tensor:
    return weight.raw if isinstance(weight, NarrowWeight) else weight


def test_a_row_that_transformers_makes_zero_is_zero(tmp_path: Path) -> None:
    """Youtu's padding token, whatever the file holds for it."""
    kept, plain = loaded_twice(tmp_path, "youtu")
    assert not plain.get_input_embeddings().weight[0].any(), "control: another version of transformers reads it"
    assert not kept.get_input_embeddings().weight.dense()[0].any()
