"""The compiled product of panels: the very bits of its reference by every instruction, and as a weight of modules."""

from __future__ import annotations

import copy
import math
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.kernels.cpu import panels
from forerun.kernels.cpu.narrow import NarrowWeight, held, row_address
from forerun.kernels.cpu.processor import Processor
from forerun.kernels.cpu.share import share
from forerun.loading.quantise import quantise
from forerun.math.integer import NEGLIGIBLE
from forerun.math.panels import encode_panels, look_up, panel_format, panel_linear, panel_parts
from forerun.models.scorer import Scorer
from support.again import assembly, compiled_again
from support.tiny import tiny_model

HIDDEN = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def in_panels(count: int, size: int) -> NarrowWeight:
    weight = torch.randn(count, size, generator=torch.Generator().manual_seed(size))
    weight[0] = 0
    weight[1] = weight[1].abs().max()
    return NarrowWeight(encode_panels(weight), panel_format(size))


def inputs(rows: int, size: int) -> Tensor:
    """With halves between two steps, groups of zeros, negligible numbers, the ends of the range, and NaN."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    x[0, :8] = torch.arange(8) - 3.5
    x[0, 8] = 127.0
    for row, odd in enumerate((0.0, NEGLIGIBLE / 2, 3.0, -3.0), start=1):
        if row < rows:
            x[row, -32:] = odd
    for row, odd in enumerate((math.nan, -math.inf), start=5):
        if row < rows:
            x[row, 3] = odd
    return x


def assert_same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.parametrize("size", [32, 96, 576])
def test_products_have_the_bits_of_the_reference(size: int) -> None:
    for count in (16, 80):
        weight = in_panels(count, size)
        numbers, scales = panel_parts(weight.raw)
        for rows in (*range(1, 12), 33, 70):
            x, bias = inputs(rows, size), torch.randn(count)
            want = panel_linear(x, numbers, scales, bias)
            assert want[0].isfinite().all() and want[5:7].isnan().all()
            assert_same(F.linear(x, weight, bias), want)


def test_control_scales_of_another_group_are_noticed() -> None:
    weight, x = in_panels(16, 96), inputs(1, 96)
    numbers, scales = panel_parts(weight.raw)
    assert not torch.equal(F.linear(x, weight), panel_linear(x.roll(1, -1), numbers.roll(1, -1), scales))


@pytest.fixture
def without_dot_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module as a processor without VPDPBUSD and SDOT compiles it."""
    monkeypatch.setattr(Processor, "has", lambda self, feature: False)
    monkeypatch.setattr(Processor, "has_dot_products", lambda self: False)
    return compiled_again(panels, monkeypatch, tmp_path)


@pytest.mark.slow  # compiled anew; machines without these instructions run the tests above with it
def test_plain_multiplications_have_the_same_bits(without_dot_products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    again, widths = without_dot_products, []
    assert again.WAY == again.PAIRS_OF_WORDS
    emit = again._emit
    monkeypatch.setattr(again, "_emit", lambda build, tokens, rest: widths.append(tokens) or emit(build, tokens, rest))
    product = CFUNCTYPE(None, *[c_int64] * 9)(again.product_address())
    assert sorted(set(widths)) == list(range(1, again.MOST_TOKENS + 1)), "no tile is compiled that nobody uses"
    weight = in_panels(80, 96)
    numbers, scales = panel_parts(weight.raw)
    for rows in (1, 2, 3, 4, 5, 9):
        x, out = inputs(rows, 96), torch.full((rows, 80), torch.nan)
        product(weight.raw.data_ptr(), x.data_ptr(), 96, out.data_ptr(), 80, rows, 96, 0, 80)
        assert_same(out, panel_linear(x, numbers, scales))


def test_another_processors_instruction_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """ARM's SDOT, as far as an assembler can tell here."""
    for name, value in (("WAY", panels.DOT_PRODUCTS), ("OUTPUTS", 4), ("_NUMBER", panels.I8), ("_WIDTH", 1)):
        monkeypatch.setattr(panels, name, value)
    code = assembly("aarch64-unknown-linux-gnu", "neoverse-n1", 7, lambda build, args: panels._emit(build, 2, args))
    assert code.count("sdot") == 8 * 4 * 2  # quads, parts, tokens


def test_threads_never_split_a_panel() -> None:
    for count, threads in ((576, 5), (1536, 7), (48, 2)):
        cuts = [share(count, part, threads, 16) for part in range(threads)]
        assert cuts[0][0] == 0 and cuts[-1][1] == count
        assert all(edge % 16 == 0 for pair in cuts for edge in pair)
    with pytest.raises(UnsupportedModel, match="within a panel"):
        row_address(in_panels(32, 32), 8)


def test_modules_and_the_embedding_hold_it() -> None:
    layer = nn.Linear(64, 48)
    layer.weight = nn.Parameter(in_panels(48, 64), requires_grad=False)
    x = torch.randn(2, 3, 64, requires_grad=True)
    out = layer(x)
    assert torch.equal(out[1, 2:], layer(x[1, 2:]))
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dense().sum(0).expand(2, 3, -1))
    ids = torch.tensor([[3, 47], [0, 16]])
    assert torch.equal(F.embedding(ids, layer.weight), layer.weight.dense()[ids])


@pytest.mark.parametrize("head_size", [16, 8])
def test_fused_layers_and_modules_agree(head_size: int) -> None:
    """Groups are the same in both. Heads of 8 are no whole panels: their layers are left to the modules."""
    model = copy.deepcopy(tiny_model("llama", **{**HIDDEN, "num_attention_heads": 64 // head_size}))
    quantise(model, "w8a8-g32", "tiny")
    assert {held(layer.mlp.up_proj.weight)[0] for layer in model.model.layers} == {"I8_32"}
    logits = []
    for use in (Kernels.ON, Kernels.OFF):
        scorer = Scorer(model, use=use)
        for row in (0, 1):
            scorer.admit(row)
        scorer.feed([0, 1], [[5, 6, 7], [8]])
        logits.append(torch.cat([scorer.score([0, 1], [[1, 2], [3, 4, 5, 6, 9]]), scorer.score([1], [[2]])]))
    assert (logits[0] - logits[1]).abs().max() < 0.02 * logits[1].abs().max()


def test_matrices_of_odd_outputs_keep_float_activations() -> None:
    model = copy.deepcopy(tiny_model("llama", **{**HIDDEN, "intermediate_size": 136, "num_key_value_heads": 2}))
    quantise(model, "w8a8-g32", "tiny", with_head=True)
    kinds = {name: weight.format.name for name, weight in model.named_parameters() if isinstance(weight, NarrowWeight)}
    assert (
        kinds["model.layers.0.mlp.up_proj.weight"] == "Q8_0"
        and kinds["model.layers.0.self_attn.q_proj.weight"] == "I8_32"
    )


def test_no_ids_at_all() -> None:
    weights = torch.randn(32, 64)
    assert panel_parts(encode_panels(weights)[:0])[0].shape == (0, 64)
    assert look_up(encode_panels(weights), torch.zeros(0, dtype=torch.long)).shape == (0, 64)
