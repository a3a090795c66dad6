"""Products with rounded weights in Triton against `math.scaled`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import torch.nn.functional as F

from forerun.kernels.linear import many_rows, norms
from forerun.kernels.linear import project as kernel
from forerun.kernels.linear.device import BYTES
from forerun.kernels.linear.project import Plan
from forerun.kernels.linear.rounding import round_rows
from forerun.kernels.scaled import ScaledWeight
from forerun.math import scaled
from forerun.math import skinny as reference
from forerun.math.scaled import FP8, SCHEMES, W8A8, Scheme
from forerun.math.skinny import Heads, LayerNorm, Norm
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

WIDTH, OUTPUTS = 160, 44
SMALL, CUT, ONE = Plan(16, 32, 4, 2, 1), Plan(16, 64, 4, 2, 3), Plan(16, 64, 1, 1)
NAMES = list(SCHEMES)


def weight_of(name: str, outputs: int = OUTPUTS, dtype: torch.dtype = torch.float32) -> ScaledWeight:
    torch.manual_seed(1)
    scheme = SCHEMES[name].fitted(WIDTH)
    assert scheme is not None
    weight = torch.randn(outputs, WIDTH).to(DEVICE, dtype)
    return ScaledWeight(*scaled.rounded_weight(weight, scheme, dtype), scheme)


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


def reference_of(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """In float32, from the same rounded numbers."""
    return scaled.linear(x.float(), weight.raw, weight.scales, weight.scheme, bias)


def check(got: Tensor, want: Tensor) -> None:
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=4 * step, atol=8 * step * float(want.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "plan"), [(1, ONE), (1, SMALL), (3, SMALL), (3, CUT), (17, SMALL)])
@pytest.mark.quick(every=3)
def test_project(name: str, rows: int, plan: Plan) -> None:
    if name == "int4":
        plan = replace(plan, block_k=64)
    weight, x = weight_of(name), rows_of(rows)
    bias, residual = torch.randn(OUTPUTS, device=DEVICE), torch.randn(rows, OUTPUTS, device=DEVICE)
    got = kernel.project(x, weight, bias, None, residual, plan=plan)
    check(got, reference_of(x, weight, bias) + residual)


def test_a_thread_adds_up_bytes_that_it_has_read_itself() -> None:
    """Where lanes add up each other's products, each may round its own in another place, and all write a result."""
    plans = [ONE, kernel.ONE_ROW_OF_BYTES, kernel.ONE_ROW_OF_BYTES_IN_PAIRS, kernel.ONE_ROW_OF_BYTES_IN_MORE_PAIRS]
    halves = [ONE, kernel.ONE_ROW_OF_HALF_BYTES]
    for plan, each in [*((plan, 1) for plan in (*plans, kernel.ONE_ROUNDED_ROW)), *((plan, 2) for plan in halves)]:
        assert plan.block_n * plan.block_k // each >= BYTES.value * 32 * plan.warps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "plan"), [(1, ONE), (3, CUT)])
@pytest.mark.quick(every=4)
def test_half_precision(name: str, dtype: torch.dtype, rows: int, plan: Plan) -> None:
    weight, x = weight_of(name, dtype=dtype), rows_of(rows, dtype)
    check(kernel.project(x, weight, plan=plan), reference_of(x, weight))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "plan"), [(1, ONE), (3, SMALL)])
@pytest.mark.quick(every=2)
def test_gate_and_norm(name: str, rows: int, plan: Plan) -> None:
    plan = replace(plan, block_k=64)
    weight, x = weight_of(name, 2 * OUTPUTS), rows_of(rows)
    norm = Norm((0.5 + torch.rand(WIDTH)).to(DEVICE), 1e-5)
    want = reference.gated(reference_of(reference.normed(x, norm), weight))
    got = kernel.gate(x, weight, norm, plan=plan)
    if not weight.scheme.rounds_rows:
        return check(got, want)
    # A norm that is rounded otherwise in its last bit may move a number to the next of 255.
    assert float((got - want).norm() / want.norm()) < 2e-3
    return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("fp8")
def test_project_heads(name: str) -> None:
    weight, bias = weight_of(name, 100), torch.randn(100, device=DEVICE)
    for rows, plan in ((1, ONE), (3, replace(SMALL, block_k=64))):
        x, angles = rows_of(rows), torch.randn(rows, 5, device=DEVICE).repeat(1, 2)
        made = []
        for _ in range(2):
            pools = (torch.zeros(90, 2, 10, device=DEVICE) for _ in range(2))
            made.append(Heads(6, 2, angles.cos(), angles.sin(), torch.arange(rows, device=DEVICE) * 7, *pools))
        got = kernel.project_heads(x, weight, bias, None, made[0], plan)
        projected = made[1].split(reference_of(x, weight, bias))
        want = reference.rotate_and_write(*projected, *made[1].tensors)
        check(got, want)
        check(made[0].key_pool, made[1].key_pool)
        check(made[0].value_pool, made[1].value_pool)


@pytest.mark.parametrize("scheme", [W8A8, FP8], ids=["w8a8", "fp8"])
def test_rows_are_rounded_as_the_reference_rounds_them(scheme: Scheme) -> None:
    """Bit for bit; a row of zeros, one that is no number, one of halves, one of any size."""
    x = torch.randn(6, 300)
    x[1] = 0
    x[2, 7] = torch.nan
    x[3] = torch.arange(300) % 255 - 127
    x[3] *= 0.5
    x[4] *= 1e-6
    x[5] = torch.inf
    x = x.to(DEVICE)
    made_rows = round_rows(x, scheme)
    values, scales = made_rows.values, made_rows.scales
    want, want_scales = scaled.rounded_rows(x, scheme)
    torch.testing.assert_close(scales, want_scales, rtol=0, atol=0, equal_nan=True)
    fine = [0, 1, 3, 4]
    assert torch.equal(values[fine].float(), want[fine].float())
    weight = ScaledWeight(*scaled.rounded_weight(torch.randn(4, 300, device=DEVICE), scheme, torch.float32), scheme)
    made = kernel.project(x, weight, plan=SMALL)
    assert made[2].isnan().all() and made[fine].isfinite().all() and not made[5].isfinite().any()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_know_each_other(name: str) -> None:
    x, weight, plan = rows_of(9), weight_of(name), replace(CUT, block_k=64)
    whole = kernel.project(x, weight, plan=plan)
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(kernel.project(other, weight, plan=plan)[0], whole[0])
    assert torch.equal(kernel.project(x[:2].contiguous(), weight, plan=plan), whole[:2])


def test_weights_are_unpacked_as_the_reference_unpacks_them() -> None:
    weight = weight_of("int4")
    torch.testing.assert_close(many_rows.wide(weight), weight.dense(), rtol=0, atol=0)
    weight = weight_of("int8")
    torch.testing.assert_close(many_rows.wide(weight), weight.dense(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rows_that_two_launches_take(name: str) -> None:
    """Of 65 to 128 rows the weight is read twice, of more a wide copy is made."""
    weight, bias = weight_of(name), torch.randn(OUTPUTS, device=DEVICE)
    for rows in (66, 130):
        x = rows_of(rows)
        check(many_rows.linear(x, weight, bias), reference_of(x, weight, bias))


@pytest.mark.slow
def test_many_rows_of_finer_types_are_rounded_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes products of 8-bit floats as bfloat16: a row's bits would hang on how many others there are."""

    def torchs(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, out_dtype: torch.dtype) -> Tensor:
        return (a.float() @ b.float() * rows * columns).to(out_dtype)

    monkeypatch.setattr(many_rows, "has_fp8", lambda place: True)
    monkeypatch.setattr(torch, "_scaled_mm", torchs)
    weight, bias, x = weight_of("fp8", 16, torch.float16), torch.randn(16, device=DEVICE).half(), rows_of(70).half()
    few = torch.cat([kernel.project(part, weight, bias) for part in x.split(64)])
    for rows in (x, round_rows(x, FP8)):
        assert torch.equal(many_rows.linear(rows, weight, bias), few)


def test_odd_widths_are_left_to_others() -> None:
    """Bytes are read in pairs."""
    scheme = SCHEMES["int8"]
    weight = ScaledWeight(*scaled.rounded_weight(torch.randn(8, 33, device=DEVICE), scheme, torch.float32), scheme)
    x = torch.randn(3, 33, device=DEVICE)
    assert "33 inputs" in str(kernel.why_not(x, weight))
    check(F.linear(x, weight), reference_of(x, weight))


def test_whole_sums_are_scaled() -> None:
    weight, x, bias = weight_of("w8a8"), rows_of(5), torch.randn(OUTPUTS, device=DEVICE)
    rows = round_rows(x, W8A8)
    sums = (rows.values.double() @ weight.raw.double().T).to(torch.int32)
    check(many_rows.scaled_sums(sums, rows.scales, weight.scales, bias, torch.float32), reference_of(x, weight, bias))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [W8A8, FP8], ids=["w8a8", "fp8"])
def test_norms_round_as_a_launch_of_its_own_does(scheme: Scheme) -> None:
    x, change = rows_of(5), rows_of(5).flip(0)
    for norm in (Norm((0.5 + torch.rand(WIDTH)).to(DEVICE), 1e-5), LayerNorm(torch.ones(WIDTH).to(DEVICE), None, 1e-5)):
        pairs = [(norms.normed_and_rounded(x, norm, scheme), norms.normed(x, norm))]
        total, inner = norms.added_and_rounded(x, change, norm, None, 0.5, scheme)
        want_total, want = norms.added(x, change, norm, None, 0.5)
        assert torch.equal(total, want_total)
        for got, plain in (*pairs, (inner, want)):
            # Fused, a norm may differ in its last bit: numbers are held to half a step of where they lie.
            step = 0.5 * got.scales[:, None] if scheme is W8A8 else plain.abs() / 16 + got.scales[:, None] / 512
            error = (got.values.float() * got.scales[:, None] - plain).abs()
            assert (error <= 1.001 * step + 1e-6).all()
            torch.testing.assert_close(got.scales, round_rows(plain, scheme).scales, rtol=1e-6, atol=0)
            weight = weight_of(scheme.name)
            made, right = kernel.project(got, weight, plan=SMALL), kernel.project(plain, weight, plan=SMALL)
            assert float((made - right).norm() / right.norm()) < 5e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_layer_takes_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows through the kernel, many through torch, of any number of dimensions; none at all."""
    monkeypatch.setattr("forerun.kernels.TRITON_DEVICES", {DEVICE.type})
    weight = weight_of(name)
    for shape in ((2, 1, WIDTH), (70, WIDTH), (0, WIDTH)):
        x = torch.randn(shape, device=DEVICE)
        got, want = F.linear(x, weight), reference_of(x, weight)
        assert got.shape == (*shape[:-1], OUTPUTS)
        if x.numel() and name == "fp8":  # tensor cores keep 14 bits of 128 products at a time
            torch.testing.assert_close(got, want, rtol=0, atol=2.0**-10 * float(want.abs().max()))
        elif x.numel():
            check(got, want)
