"""`kernels.cache_write` against `math.cache_write` and against transformers' own rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm import modeling_glm as glm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.olmo2 import modeling_olmo2 as olmo2

pytest.importorskip("triton")

from forerun import ops
from forerun.kernels.attention import cache_write as kernel
from forerun.kernels.linear import norms
from forerun.math import cache_write as reference
from forerun.math import skinny
from forerun.math.skinny import Heads, Norm
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

SHAPES = [(4, 2, 64, 64), (9, 3, 80, 48), (1, 1, 16, 16), (3, 10, 256, 256)]  # query heads, key heads, sizes
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[1], dtype) for dtype in DTYPES[1:]]
ADDRESSES = torch.tensor([3, 9, 0, 11, 7], device=DEVICE)


def same(got: Tensor, want: Tensor) -> None:
    """The same bits; but the interpreter cuts bfloat16 off where everybody else rounds."""
    is_cut = DEVICE.type == "cpu" and got.dtype is torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-6 if is_cut else 0, atol=2**-6 if is_cut else 0)


def new_tokens(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, H, D] as transformers lays them out: heads before tokens."""
    heads, key_heads, size, value_size = shape
    kinds = ((heads, size), (key_heads, size), (key_heads, value_size))
    query, keys, values = (torch.randn(h, 5, d).to(DEVICE, dtype).transpose(0, 1) for h, d in kinds)
    return query, keys, values


def pools(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys.new_full((12, *keys.shape[1:]), 5.0), values.new_full((12, *values.shape[1:]), 5.0)


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_write(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    _, keys, values = new_tokens(shape, dtype)
    got, want = pools(keys, values), pools(keys, values)
    kernel.write(keys, values, ADDRESSES, *got)
    reference.write(keys, values, ADDRESSES, *want)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), "places that are nobody's stay as they were"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_rotate_and_write(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    query, keys, values = new_tokens(shape, dtype)
    cos, sin = (torch.randn(5, shape[2]).to(DEVICE, dtype) for _ in range(2))
    got, want = pools(keys, values), pools(keys, values)
    rotated = kernel.rotate_and_write(query, keys, values, cos, sin, ADDRESSES, *got)
    same(rotated, reference.rotate_and_write(query, keys, values, cos, sin, ADDRESSES, *want))
    same(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(("turning", "interleaved"), [(64, True), (32, False), (32, True), (0, False)])
def test_a_part_of_a_head_and_neighbours(turning: int, interleaved: bool) -> None:
    query, keys, values = new_tokens(SHAPES[0], torch.float32)
    cos, sin = (torch.randn(5, turning).to(DEVICE) for _ in range(2))
    got, want = pools(keys, values), pools(keys, values)
    rotated = kernel.rotate_and_write(query, keys, values, cos, sin, ADDRESSES, *got, interleaved)
    same(rotated, reference.rotate_and_write(query, keys, values, cos, sin, ADDRESSES, *want, interleaved))
    same(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("rotate", [kernel.rotate_and_write, reference.rotate_and_write])
def test_float32_angles_round_once(rotate: Any) -> None:
    """OLMo 2 rotates 16-bit heads in float32."""
    query, keys, values = new_tokens(SHAPES[0], torch.float16)
    cos, sin = (torch.randn(5, 64).to(DEVICE) for _ in range(2))
    assert kernel.why_not(query, keys, values, angles=(cos, sin)) is None
    got = pools(keys, values)
    states = (t.transpose(0, 1)[None] for t in (query, keys))
    want = [t[0].transpose(0, 1) for t in olmo2.apply_rotary_pos_emb(*states, cos[None], sin[None])]
    same(rotate(query, keys, values, cos, sin, ADDRESSES, *got), want[0])
    same(got[0][ADDRESSES], want[1])


def test_reference_rotates_neighbours_as_transformers_does() -> None:
    query, keys, _ = new_tokens(SHAPES[0], torch.float32)
    angles = torch.randn(5, 16, device=DEVICE).repeat(1, 2)
    states, cos, sin = (t.transpose(0, 1)[None] for t in (query, keys)), angles.cos()[None], angles.sin()[None]
    want, _ = glm.apply_rotary_pos_emb(*states, cos, sin)
    torch.testing.assert_close(reference.rotated(query, cos[0], sin[0], interleaved=True), want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_rotates_as_transformers_does(dtype: torch.dtype) -> None:
    query, keys, _ = new_tokens(SHAPES[0], dtype)
    cos, sin = (torch.randn(5, 64).to(DEVICE, dtype) for _ in range(2))
    want, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos[None], sin[None])
    assert torch.equal(reference.rotated(query, cos, sin), want[0].transpose(0, 1))


def test_what_fits() -> None:
    query, keys, _ = new_tokens(SHAPES[0], torch.float32)
    assert kernel.why_not(query, keys) is None
    assert "types" in str(kernel.why_not(query, keys.half()))
    assert "contiguous" in str(kernel.why_not(query.mT))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("turning", [16, 8])
@pytest.mark.quick("16-True-False")
def test_heads_as_one_product_makes_them(turning: int, ordered: bool, wide: bool) -> None:
    """In any order, normed on the way."""
    torch.manual_seed(0)
    order = torch.randperm(9, device=DEVICE).int() if ordered else None
    norms = [Norm(torch.rand(24, device=DEVICE), 1e-5, 0.5 if wide else 0.0, wide) for _ in range(2)]
    cos, sin, made = (torch.randn(5, n, device=DEVICE) for n in (turning, turning, 9 * 24))
    got, want = (tuple(torch.zeros(12, 2, 24, device=DEVICE) for _ in range(2)) for _ in range(2))
    own, right = (Heads(5, 2, cos, sin, ADDRESSES, *pools, True, order, *norms) for pools in (got, want))
    assert kernel.why_not_heads(made, own) is None
    torch.testing.assert_close(kernel.write_heads(made, own), skinny.write_heads(made, right))
    for pool, other in zip(got, want, strict=True):
        torch.testing.assert_close(pool, other)
    assert "all heads as one" in str(kernel.why_not_heads(made, replace(own, key_norm=Norm(torch.ones(48), 0.0))))
    assert "as those of keys" in str(kernel.why_not_heads(made, replace(own, key_norm=None)))


def test_float64_is_left_to_the_reference() -> None:
    """Kernels compute in float32."""
    query, keys, values = new_tokens(SHAPES[0], torch.float64)
    angles = torch.rand(5, 64, dtype=torch.float64, device=DEVICE)
    assert "float64" in (kernel.why_not(query, keys, values, *pools(keys, values), angles=(angles, angles)) or "")
    norm = Norm(torch.ones(64, dtype=torch.float64, device=DEVICE), 1e-6)
    assert "float64" in (norms.why_not(query.contiguous(), norm) or "")
    wide = torch.randn(3, 64, dtype=torch.float64, device=DEVICE)
    assert torch.equal(ops.gated(wide), skinny.gated(wide)) and torch.equal(
        ops.normed(wide, norm), skinny.normed(wide, norm)
    )
