"""Weights that stay narrow in memory: the bits of their float32 copies, and a parameter that modules can hold."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

pytest.importorskip("numba")

from numba import njit

from forerun import ops
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.kernels.cpu import widen
from forerun.kernels.cpu.linear import linear
from forerun.kernels.cpu.narrow import NarrowWeight, narrow_parameter
from forerun.kernels.cpu.product import product_address
from forerun.kernels.cpu.tile import widen_row
from forerun.kernels.cpu.widen import FORMATS, number_of
from forerun.math.blocks import format_named
from forerun.math.integer import encode_rows, row_format
from forerun.models.bodies.merging import by_outputs
from forerun.models.scorer import Scorer
from support.stored import SIZE, size_of, sizes_for, store, stored_rows, widened
from support.tiny import tiny_model

NARROW = [stored.name for stored in FORMATS if stored.name != "F32"]


@pytest.mark.quick("Q4_1")
@pytest.mark.parametrize("name", NARROW)
def test_products_have_the_bits_of_the_float32_copy(name: str) -> None:
    size = size_of(name)
    for count in (1, 4, 37):
        weight = NarrowWeight(*stored_rows(name, count, size))
        dense, bias = weight.dense(), torch.randn(count)
        for rows in range(1, 34):
            x = torch.randn(rows, size)
            assert torch.equal(F.linear(x, weight, bias), linear(x, dense, bias, 2)), (count, rows)


@pytest.mark.quick("Q4_1", "Q6_K", "BF16")
@pytest.mark.parametrize("name", NARROW)
def test_float32_copies_are_what_the_reference_decodes(name: str) -> None:
    """Bit by bit, in memory of its own and in some that is larger, of which nothing else is written."""
    size = size_of(name)
    for count in (1, 2, 37):
        weight = NarrowWeight(*stored_rows(name, count, size))
        want = weight.format.decode(weight.raw.flatten()).view(count, size).view(torch.int32)
        room = torch.full((count * size + 5,), 7.0)
        assert torch.equal(weight.dense().view(torch.int32), want)
        made = weight.dense(room)
        assert made.data_ptr() == room.data_ptr() and torch.equal(made.view(torch.int32), want)
        assert room[count * size :].eq(7).all()


@pytest.mark.parametrize("size", [1, 24])
def test_float32_copies_of_rows_that_no_loop_takes(size: int) -> None:
    values = torch.randn(3, size).bfloat16()
    weight = NarrowWeight(values.view(torch.uint8), format_named("BF16"))
    assert torch.equal(weight.dense(), values.float())
    assert torch.equal(weight.dense(torch.zeros(100)), values.float())


def test_control_another_rounding_of_the_offset_is_noticed() -> None:
    """Bits must be compared closely enough to tell Q4_1's value from one that is rounded once more."""
    raw, stored = stored_rows("Q4_1", 37)
    dense = NarrowWeight(raw, stored).dense()
    x = torch.randn(3, SIZE)
    assert not torch.equal(linear(x, dense.half().float(), None, 1), F.linear(x, NarrowWeight(raw, stored)))


@pytest.mark.quick("BF16")
@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)], ids=["BF16", "F16"])
def test_all_half_precision_numbers_are_widened_exactly(name: str, dtype: torch.dtype) -> None:
    """All 65,536, infinities and NaN included, through a product with a unit vector."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    raw = torch.zeros(1 << 16, 16, dtype=torch.int16)
    raw[:, 0] = every
    got = F.linear(torch.eye(16)[:1], NarrowWeight(raw.view(torch.uint8), format_named(name)))[0]
    torch.testing.assert_close(got, every.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_instruction", [False, True])
def test_halves_are_widened_by_bits_where_no_instruction_does(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 65,536, beside what the processor itself makes of them."""
    if has_instruction and not widen.HAS_HALVES:
        pytest.skip("a processor without the instruction")
    monkeypatch.setattr(widen, "HAS_HALVES", has_instruction)
    kind, lanes = number_of("F16"), widen.LANES

    @njit
    def widened(bits: int, out: int, size: int) -> None:
        widen_row(kind, lanes, bits, out, size)

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    found = torch.empty(1 << 16)
    widened(every.data_ptr(), found.data_ptr(), 1 << 16)
    torch.testing.assert_close(found, every.view(torch.float16).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), every < 0)


@pytest.mark.parametrize("name", [name for name in NARROW if name.startswith("Q")])
def test_blocks_decode_as_in_the_formats_own_library(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    raw, stored = stored_rows(name, 8, size_of(name))
    want = gguf.quants.dequantize(raw.numpy(), getattr(gguf.GGMLQuantizationType, name))
    assert torch.equal(NarrowWeight(raw, stored).dense(), torch.from_numpy(want))


def test_names_of_formats_agree_with_the_references() -> None:
    for name in NARROW:
        stored = format_named(name)
        assert FORMATS[number_of(name)].run(1) == (stored.values, stored.size)
    assert product_address(number_of("F32")) == product_address(0)


def test_a_module_holds_it_as_its_weight() -> None:
    raw, stored = stored_rows("BF16", 7)
    layer = nn.Linear(SIZE, 7)
    plain = copy.deepcopy(layer)
    layer.weight, plain.weight = narrow_parameter(raw, stored), nn.Parameter(NarrowWeight(raw, stored).dense())
    many, few = torch.randn(100, SIZE), torch.randn(2, SIZE, requires_grad=True)
    torch.testing.assert_close(layer(many), plain(many))
    layer(few).sum().backward()
    torch.testing.assert_close(few.grad, plain.weight.sum(0).expand(2, -1))  # inputs have gradients
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, NarrowWeight) and twin.weight.raw.data_ptr() != layer.weight.raw.data_ptr()
    assert [name for name, _ in twin.named_parameters()] == ["weight", "bias"]
    assert layer.weight.shape == (7, SIZE) and layer.weight.dtype == torch.float32
    torch.testing.assert_close(layer.weight @ torch.eye(SIZE), plain.weight.detach())  # whatever else torch can do
    assert layer.to("cpu", torch.float32).weight.raw.data_ptr() == layer.weight.raw.data_ptr()


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "I8"])
def test_layers_whose_weights_are_turned_multiply_as_others_do(name: str) -> None:
    """GPT-2's, which say [inputs, outputs], and those that write their product as `x @ weight.T`."""
    raw, stored = stored_rows(name, 7) if name != "I8" else (encode_rows(torch.randn(7, SIZE)), row_format(SIZE))
    turned, layer, bias = Conv1D(7, SIZE), nn.Linear(SIZE, 7), torch.randn(7)
    turned.weight, layer.weight = narrow_parameter(raw, stored, is_turned=True), narrow_parameter(raw, stored)
    turned.bias, layer.bias = nn.Parameter(bias), nn.Parameter(bias)
    assert turned.weight.shape == (SIZE, 7) and torch.equal(turned.weight.dense(), layer.weight.dense().T)
    twins = [turned, copy.deepcopy(turned), *([pickle.loads(pickle.dumps(turned))] if name != "I8" else [])]
    with torch.no_grad():
        for rows in (1, 5, 100):
            x = torch.randn(rows, SIZE)
            for twin in twins:
                assert torch.equal(twin(x), layer(x)), rows
            assert torch.equal(x @ layer.weight.T, F.linear(x, layer.weight))
    assert torch.equal(by_outputs(turned).raw, raw) and not by_outputs(turned).is_turned
    torch.testing.assert_close(turned.weight.T @ torch.eye(SIZE), layer.weight.dense())  # whatever else torch can do
    torch.testing.assert_close(F.linear(torch.eye(7), turned.weight), layer.weight.dense())


def test_an_embedding_widens_the_rows_it_looks_up() -> None:
    raw, stored = stored_rows("Q8_0", 9)
    embedding = nn.Embedding(9, SIZE)
    embedding.weight = narrow_parameter(raw, stored)
    ids = torch.tensor([[3, 0], [8, 3]])
    assert torch.equal(embedding(ids), NarrowWeight(raw, stored).dense()[ids])
    for odd in (-1, 9):
        with pytest.raises((IndexError, RuntimeError)):
            embedding(torch.tensor([odd]))


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.zero_(),
        lambda weight: weight.data.__setitem__(0, 1.0),
        lambda weight: weight.requires_grad_(),
        lambda weight: setattr(weight, "data", torch.zeros(4, SIZE)),
        lambda weight: nn.ParameterList([weight]).bfloat16(),
    ],
    ids=["in place", "its data", "an entry", "to be trained", "other data", "another type"],
)
def test_changes_are_refused_with_the_remedy(change: Any) -> None:
    weight = narrow_parameter(*stored_rows("BF16", 4))
    before = weight.raw.clone()
    with torch.no_grad(), pytest.raises(InvalidArgument, match="dtype='float32'"):
        change(weight)
    assert torch.equal(weight.raw, before)


@pytest.mark.parametrize(
    ("pairs", "pays"),
    [
        ([(4.0, 10.0), (6.0, 11.0), (11.0, 12.0)], True),
        ([(4.0, 10.0), (6.0, 11.0), (14.0, 12.0)], False),  # small batches would be slower
        ([(9.8, 10.0), (10.9, 11.0), (12.0, 12.0)], False),  # nothing gained
    ],
)
def test_narrow_weights_are_never_the_slower_ones(pairs: list[tuple[float, float]], pays: bool) -> None:
    from forerun.kernels.cpu.choice import is_never_slower

    assert is_never_slower(pairs) is pays


@pytest.mark.quick("BF16")
@pytest.mark.parametrize("name", NARROW)
def test_the_whole_stack_gives_the_bits_of_float32(name: str) -> None:
    """Logits of passes over 1 to 32 rows, and of one over several tokens of each."""
    narrow = copy.deepcopy(tiny_model("llama", **sizes_for(name)))
    store(narrow, name)
    stored, plain = stacked(narrow), stacked(widened(narrow))
    for count in range(1, 33):
        blocks = [[7 * row % 97] for row in range(count)]
        assert torch.equal(scored(stored, blocks), scored(plain, blocks)), count
    blocks = [[1, 2], [3, 4, 5, 6, 9], list(range(25))]
    assert torch.equal(scored(stored, blocks), scored(plain, blocks))


@pytest.mark.quick("Q4_1")
@pytest.mark.parametrize("name", NARROW)
def test_control_a_matrix_that_is_off_by_its_last_bits_is_noticed(name: str) -> None:
    """One of fourteen, every number of which is the next float32."""
    narrow = copy.deepcopy(tiny_model("llama", **sizes_for(name)))
    store(narrow, name)
    other = widened(narrow)
    weight = other.model.layers[-1].mlp.down_proj.weight.data
    weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
    blocks = [[7 * row % 97] for row in range(32)]
    assert not torch.equal(scored(stacked(narrow), blocks), scored(stacked(other), blocks))


def stacked(model: Any) -> Scorer:
    """32 rows with texts of different lengths behind the compiled layers."""
    scorer = Scorer(model, use=Kernels.ON)
    assert scorer.is_fused
    for row in range(32):
        scorer.admit(row)
        scorer.feed([row], [[(5 * row + place) % 97 for place in range(1 + row % 7)]])
    return scorer


def scored(scorer: Scorer, blocks: list[list[int]]) -> Tensor:
    """Logits of new tokens of the first rows, which are then taken back."""
    rows = list(range(len(blocks)))
    lengths = [scorer.length(row) for row in rows]
    logits = scorer.score(rows, blocks)
    scorer.rewind(rows, lengths)
    return logits


@pytest.mark.parametrize("width", (SIZE - 32, SIZE + 32))
def test_inputs_of_another_width_are_refused_by_torch(width: int) -> None:
    """A product that has the weight's address alone would read past its rows."""
    weight = NarrowWeight(*stored_rows("Q8_0", 32))
    for product in (F.linear, partial(ops.linear, use=Kernels.ON)):
        for held in (weight, weight.dense()):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                product(torch.randn(2, width), held)
