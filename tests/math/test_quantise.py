"""Quantisers against their rules written out value by value, against the format's own library, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.math.blocks import decode_q4_1, decode_q8_0
from forerun.math.quantise import GROUP, encode_q4_1, encode_q8_0


def groups() -> Tensor:
    """Ordinary groups; halves between two steps; zeros; one value; all alike; large and tiny."""
    torch.manual_seed(0)
    steps = torch.arange(GROUP) - 15.5
    steps[-1] = 127.0
    single = torch.zeros(GROUP)
    single[5] = -3.25
    rows = [
        *torch.randn(40, GROUP),
        steps,
        torch.zeros(GROUP),
        single,
        torch.full((GROUP,), 0.7),
        torch.randn(GROUP) * 1e3,
    ]
    return torch.stack([*rows, torch.randn(GROUP) * 1e-4])


def by_rule_q8_0(group: Tensor) -> list[float]:
    scale = np.float32(group.abs().max()) / np.float32(127)
    inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
    stored = np.float32(np.float16(scale))
    found = []
    for value in group.numpy():
        steps = float(value * inverse)
        found.append(float(stored) * math.copysign(math.floor(abs(steps) + 0.5), steps))
    return found


def test_eight_bits_follow_the_rule() -> None:
    values = groups()
    got = decode_q8_0(encode_q8_0(values).flatten()).view(values.shape)
    for group, mine in zip(values, got.tolist(), strict=True):
        assert mine == pytest.approx(by_rule_q8_0(group), abs=0, rel=1e-7)


@pytest.mark.parametrize(("name", "encode"), [("Q8_0", encode_q8_0), ("Q4_1", encode_q4_1)])
def test_bytes_are_those_of_the_formats_own_library(name: str, encode: object) -> None:
    gguf = pytest.importorskip("gguf")
    values = torch.cat([groups(), torch.randn(200, GROUP)])
    want = gguf.quants.quantize(values.numpy(), getattr(gguf.GGMLQuantizationType, name))
    assert np.array_equal(encode(values).numpy(), want)  # type: ignore[operator]


def test_errors_are_at_most_half_a_step() -> None:
    values = torch.randn(64, 4 * GROUP)
    eight = decode_q8_0(encode_q8_0(values).flatten()).view(-1, GROUP)
    four = decode_q4_1(encode_q4_1(values).flatten()).view(-1, GROUP)
    plain = values.view(-1, GROUP)
    largest, span = plain.abs().amax(1, keepdim=True), plain.amax(1, keepdim=True) - plain.amin(1, keepdim=True)
    half_precision = 2**-10 * largest  # of the stored scale and offset, over a whole group
    assert ((eight - plain).abs() <= largest / 254 + half_precision).all()
    assert ((four - plain).abs() <= span / 30 + 2 * half_precision).all()
    assert ((four - plain).abs() > span / 60).any()  # the bound is not an idle one


def test_groups_of_zeros_and_of_equal_values() -> None:
    zeros = torch.zeros(2, GROUP)
    assert torch.equal(decode_q8_0(encode_q8_0(zeros).flatten()), zeros.flatten())
    alike = torch.full((1, GROUP), 0.5)
    assert torch.equal(decode_q4_1(encode_q4_1(alike).flatten()), alike.flatten())
