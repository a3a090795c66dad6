"""The compiled integer product: the very bits of its reference for any number of rows, as a weight of modules."""

from __future__ import annotations

import copy
import math
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.kernels.cpu import integer, processor, widen
from forerun.kernels.cpu.narrow import NarrowWeight, held, narrow_parameter
from forerun.loading.quantise import quantise
from forerun.math.integer import NEGLIGIBLE, encode_rows, integer_linear, parts, row_format
from forerun.models.scorer import Scorer
from support.again import assembly, compiled_again
from support.tiny import tiny_model


def integers(count: int, size: int, seed: int = 0) -> NarrowWeight:
    weight = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    return NarrowWeight(encode_rows(weight), row_format(size))


def inputs(rows: int, size: int) -> Tensor:
    """With halves between two steps, zeros, negligible numbers, and numbers that are none."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    x[0, :8] = torch.arange(8) - 3.5
    x[0, 8] = 127.0
    for row, odd in enumerate((0.0, NEGLIGIBLE / 2, math.nan, math.inf), start=1):
        if row < rows:
            x[row, 3 if math.isnan(odd) or math.isinf(odd) else slice(None)] = odd
    return x


def assert_same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.parametrize("size", [32, 96, 576])
def test_products_have_the_bits_of_the_reference(size: int) -> None:
    for count in (1, 4, 37):
        weight = integers(count, size)
        numbers, scales = parts(weight.raw)
        for rows in (*range(1, 15), 33, 70):
            x, bias = inputs(rows, size), torch.randn(count)
            assert_same(F.linear(x, weight, bias), integer_linear(x, numbers, scales, bias))


def test_many_tokens_have_the_bits_of_the_reference() -> None:
    """Whole tiles of tokens and of outputs, some of either that are left over, and sums beyond 24 bits."""
    for count, size in ((16, 32), (32, 96), (57, 1056)):
        weight = integers(count, size)
        numbers, scales = parts(weight.raw)
        for rows in (15, 16, 17, 47, 64, 130, 300):
            x = inputs(rows, size)
            x[5:7] = x[5:7].sign()  # every number is the largest
            assert_same(F.linear(x, weight), integer_linear(x, numbers, scales))


@pytest.mark.slow  # compiled anew; machines whose own form it is run the test above with it
@pytest.mark.parametrize("has_partial_sums", [False, True])
def test_bytes_by_fours_have_the_same_bits(
    has_partial_sums: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What processors that are not x86 compile, by LLVM's function that becomes SDOT there and without it."""
    if has_partial_sums and not processor.HAS_PARTIAL_SUMS:
        pytest.skip("LLVM before 22 has no such function")
    monkeypatch.setattr(widen, "IS_X86", False)
    monkeypatch.setattr(processor, "HAS_PARTIAL_SUMS", has_partial_sums)
    again = compiled_again(integer, monkeypatch, tmp_path)
    assert again.RUN == 16 and again.ACTIVATION_BYTES == 1
    product = CFUNCTYPE(None, *[c_int64] * 9)(again.product_address())
    weight = integers(37, 96)
    numbers, scales = parts(weight.raw)
    for rows in (1, 2, 5, 9):
        x, out = inputs(rows, 96), torch.full((rows, 37), torch.nan)
        product(weight.raw.data_ptr(), x.data_ptr(), 96, out.data_ptr(), 37, rows, 96, 0, 37)
        assert_same(out, integer_linear(x, numbers, scales))


@pytest.mark.skipif(not processor.HAS_PARTIAL_SUMS, reason="LLVM before 22 makes no dot products of sums")
@pytest.mark.parametrize(("name", "count"), [("neoverse-n1", 4 * 2), ("cortex-a72", 0)])  # rows, tokens
def test_dot_products_where_an_arm_processor_has_them(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(widen, "IS_X86", False)
    again = compiled_again(integer, monkeypatch, tmp_path)
    code = assembly("aarch64-unknown-linux-gnu", name, 7, lambda build, arguments: again._emit(build, 4, 2, arguments))
    assert code.count("sdot") == count


def test_sums_do_not_overflow() -> None:
    """All values at the ends of the range, as many as fit: 16,384 x 127 x 127."""
    weight = NarrowWeight(encode_rows(torch.ones(4, 1 << 14)), row_format(1 << 14))
    torch.testing.assert_close(F.linear(-torch.ones(2, 1 << 14), weight), torch.full((2, 4), -16384.0))


def test_control_another_rounding_is_noticed() -> None:
    weight, x = integers(37, 96), inputs(1, 96)
    numbers, scales = parts(weight.raw)
    away = x + x.sign() * 1e-3  # ties no longer are
    assert not torch.equal(F.linear(x, weight), integer_linear(away, numbers, scales))


def test_a_module_holds_it_and_gradients_pass_straight_through() -> None:
    layer = nn.Linear(64, 5)
    layer.weight = narrow_parameter(encode_rows(layer.weight.detach()), row_format(64))
    x = torch.randn(2, 3, 64, requires_grad=True)
    out = layer(x)
    assert torch.equal(out[1, 2:], layer(x[1, 2:]))
    with torch.no_grad():
        assert torch.equal(out, layer(x))
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dense().sum(0).expand(2, 3, -1))
    torch.testing.assert_close(layer.bias.grad, torch.full((5,), 6.0))
    with pytest.raises(InvalidArgument, match="take float32"):
        layer(torch.randn(1, 64).double())


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_by_choice(is_tied: bool) -> None:
    """Eight bits in groups unless something is said; as they are; like the layers."""
    plain = tiny_model("llama", tie_word_embeddings=is_tied)
    kinds = []
    for with_head in (None, False, True):
        model = copy.deepcopy(plain)
        quantise(model, "w8a8", "tiny", with_head=with_head)
        ends = model.get_input_embeddings().weight, model.lm_head.weight
        assert (ends[0] is ends[1]) == is_tied
        kinds.append({held(weight)[0] for weight in ends})
        assert {held(layer.mlp.up_proj.weight)[0] for layer in model.model.layers} == {"I8"}
    assert kinds == [{"Q8_0"}, {"float32"}, {"I8"}]


def test_fused_layers_and_modules_agree_on_integers() -> None:
    """Integers are the same in both; what lies between two products is computed in another order."""
    model = copy.deepcopy(tiny_model("llama"))
    quantise(model, "w8a8", "tiny")
    formats = {w.format.name for w in model.parameters() if isinstance(w, NarrowWeight)}
    assert formats == {"I8", "Q8_0"}
    logits = []
    for use in (Kernels.ON, Kernels.OFF):
        scorer = Scorer(model, use=use)
        for row in (0, 1):
            scorer.admit(row)
        scorer.feed([0, 1], [[5, 6, 7], [8]])
        logits.append(torch.cat([scorer.score([0, 1], [[1, 2], [3, 4, 5, 6, 9]]), scorer.score([1], [[2]])]))
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()
