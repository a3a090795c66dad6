"""`kernels.linear.project` and `kernels.linear.norms` against `math.skinny`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun import ops
from forerun.kernels.counters import shared_counters
from forerun.kernels.linear import norms
from forerun.kernels.linear import project as kernel
from forerun.kernels.linear.project import Plan
from forerun.math import skinny as reference
from forerun.math.skinny import Activation, Heads, LayerNorm, Norm
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone

pytestmark = kernel_tests()

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 3, 17, 64]
# Every number of rows in float32, every dtype with three rows and with one: the interpreter takes its time.
KINDS = [(rows, torch.float32) for rows in ROWS] + [(rows, dtype) for rows in (1, 3) for dtype in DTYPES[1:]]
SMALL, CUT, ONE = Plan(16, 16, 4, 2, 1), Plan(16, 32, 4, 2, 3), Plan(4, 32, 4, 1)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Tensor:
    return (gain * torch.randn(*shape)).to(DEVICE, dtype)


def norm_of(size: int, dtype: torch.dtype = torch.float32) -> Norm:
    return Norm((0.5 + torch.rand(size)).to(DEVICE, dtype), 1e-5)


def wide(value: Tensor | Norm | None) -> Tensor | Norm | None:
    """The same numbers in float32."""
    if isinstance(value, Norm):
        return replace(value, weight=value.weight.float())
    return None if value is None else value.float()


def check(got: Tensor, want: Tensor) -> None:
    """Sums in float32 and one rounding at the end: within a few steps of the dtype of what float32 says."""
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want, rtol=4 * step, atol=4 * step * float(want.abs().max()))


# ONE is a plan for a single row. Tiles as they are chosen for many rows (None) take the interpreter minutes.
PLANNED = [
    (rows, dtype, plan)
    for rows, dtype in KINDS
    for plan in (None, SMALL, CUT, ONE)
    if (plan is not ONE or rows == 1) and (plan is not None or rows <= 3 or DEVICE.type != "cpu")
]


@pytest.mark.parametrize(("rows", "dtype", "plan"), PLANNED)
@pytest.mark.quick(every=4)
def test_project(rows: int, dtype: torch.dtype, plan: Plan | None) -> None:
    """Sizes that no tile divides; a bias, a norm and a residual."""
    x, weight = numbers(rows, 70, dtype=dtype), numbers(45, 70, dtype=dtype)
    bias, residual = numbers(45, dtype=dtype), numbers(rows, 45, dtype=dtype)
    norm = norm_of(70, dtype)
    got = kernel.project(x, weight, bias, norm, residual, plan=plan)
    check(got, reference.project(*map(wide, (x, weight, bias, norm, residual))))  # type: ignore[arg-type]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("rows", "dtype"), KINDS)
def test_gate(rows: int, dtype: torch.dtype) -> None:
    x, weight, norm = numbers(rows, 70, dtype=dtype), numbers(2 * 45, 70, dtype=dtype, gain=0.3), norm_of(70, dtype)
    for plan in (SMALL, ONE)[: 2 if rows == 1 else 1]:
        check(kernel.gate(x, weight, norm, plan=plan), reference.gate(*map(wide, (x, weight, norm))))  # type: ignore[arg-type]


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("plan", [ONE, SMALL, CUT])
def test_activation_multiplier_and_gains_stored_less_one(activation: Activation, plan: Plan) -> None:
    x, weight, bias = numbers(1, 70), numbers(90, 70, gain=0.3), numbers(90)
    norm, residual = replace(norm_of(70), offset=1.0, wide=True), numbers(1, 90)
    got = kernel.project(x, weight, bias, norm, residual, activation, 0.3, plan)
    check(got, reference.project(x, weight, bias, norm, residual, activation, 0.3))
    if plan is not CUT:
        got = kernel.gate(x, weight, norm, bias, activation, plan)
        check(got, reference.gate(x, weight, norm, bias, activation))
    check(norms.gated(residual, activation), reference.gated(residual, activation))


def heads_of(rows: int, dtype: torch.dtype, num_queries: int = 6, num_keys: int = 2, size: int = 10) -> Heads:
    """Grouped heads of an odd half; angles side by side, tokens written out of order."""
    angles = torch.randn(rows, size // 2)
    both = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1).to(DEVICE, dtype)
    cos, sin = both.chunk(2, dim=-1)
    addresses = torch.randperm(90)[:rows].to(DEVICE)
    pools = (torch.full((90, num_keys, size), 5.0).to(DEVICE, dtype) for _ in range(2))
    return Heads(num_queries, num_keys, cos, sin, addresses, *pools)


def wide_heads(heads: Heads) -> Heads:
    names = ("cos", "sin", "key_pool", "value_pool")
    return replace(heads, **{name: getattr(heads, name).float().clone() for name in names})


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("rows", "dtype"), KINDS)
def test_project_heads(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = numbers(rows, 70, dtype=dtype), numbers(100, 70, dtype=dtype), numbers(100, dtype=dtype)
    norm = norm_of(70, dtype)
    for plan in (SMALL, ONE)[: 2 if rows == 1 else 1]:
        heads = heads_of(rows, dtype)
        want_heads = wide_heads(heads)
        want = reference.project_heads(*map(wide, (x, weight, bias, norm)), want_heads)  # type: ignore[arg-type]
        check(kernel.project_heads(x, weight, bias, norm, heads, plan), want)
        check(heads.key_pool, want_heads.key_pool)
        check(heads.value_pool, want_heads.value_pool)


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("turning", "interleaved"), [(10, True), (4, False), (4, True), (0, False)])
def test_rotations_and_orders_of_heads(turning: int, interleaved: bool, in_order: bool) -> None:
    """A part of a head that turns, neighbours that turn together, heads that lie in any order."""
    order = None if in_order else torch.randperm(10, dtype=torch.int32, device=DEVICE)
    for plan, rows in ((ONE, 1), (SMALL, 3)):
        x, weight, bias, heads = numbers(rows, 70), numbers(100, 70), numbers(100), heads_of(rows, torch.float32)
        angles = torch.randn(rows, turning // 2, device=DEVICE).repeat(1, 2)
        heads = replace(heads, cos=angles.cos(), sin=angles.sin(), interleaved=interleaved, order=order)
        want_heads = wide_heads(heads)
        want = reference.project_heads(x, weight, bias, None, want_heads)
        check(kernel.project_heads(x, weight, bias, None, heads, plan), want)
        check(heads.key_pool, want_heads.key_pool)
        check(heads.value_pool, want_heads.value_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normed(dtype: torch.dtype) -> None:
    """As torch rounds it, for rows and for heads that lie apart."""
    x, norm = numbers(5, 70, dtype=dtype, gain=3.0), norm_of(70, dtype)
    check(norms.normed(x, norm), reference.normed(x, norm).float())
    heads, norm = numbers(3, 7, 12, dtype=dtype)[:, 2:6], norm_of(12, dtype)
    check(norms.normed(heads, norm), reference.normed(heads, norm).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_and_gated(dtype: torch.dtype) -> None:
    x, change, norm = numbers(5, 70, dtype=dtype), numbers(5, 70, dtype=dtype), norm_of(70, dtype)
    layer = LayerNorm(norm.weight, numbers(70, dtype=dtype), 1e-5)
    for kind in (norm, layer):
        for got, want in zip(norms.added(x, change, kind), reference.added(x, change, kind), strict=True):
            check(got, want.float())
    check(norms.normed(x + 3, layer), reference.normed(x + 3, layer).float())
    check(norms.gated(change), reference.gated(change.float()))


@pytest.mark.quick("dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_all_kinds(dtype: torch.dtype) -> None:
    """Gains stored less one or applied in float32, no bias, a gain a head; a change that is normed and scaled."""
    x, change, norm = numbers(5, 70, dtype=dtype), numbers(5, 70, dtype=dtype), norm_of(70, dtype)
    first = replace(norm_of(70, dtype), offset=1.0, wide=True)
    layer, plain = LayerNorm(norm.weight, None, 1e-5), LayerNorm(norm.weight, norm_of(70, dtype).weight, 1e-5, 1.0)
    for kind in (norm, replace(norm, wide=True), first, layer, plain, None):
        for before in (None, norm, first):
            got, want = (f(x, change, kind, before, 0.3) for f in (norms.added, reference.added))
            for own, right in zip(got, want, strict=True):
                check(own, right.float())
    heads, gains = numbers(3, 7, 12, dtype=dtype), norm_of(84, dtype).weight.view(7, 12)
    for each in (LayerNorm(gains, None, 1e-5), Norm(gains, 1e-5)):
        check(norms.normed(heads, each), reference.normed(heads, each).float())


def test_gains_that_are_stored_less_one_are_rounded_before_they_multiply() -> None:
    """Nemotron's: with gains in float32 a fifth of the numbers had other bits."""
    x, weight, bias = (numbers(*shape, dtype=torch.float16) for shape in ((64, 70), (70,), (70,)))
    want = torch.nn.functional.layer_norm(x, (70,), weight + 1, bias, 1e-5)
    assert (norms.normed(x, LayerNorm(weight, bias, 1e-5, 1.0)) != want).float().mean() < 0.01


@pytest.mark.parametrize("plan", [SMALL, ONE])
def test_a_huge_row_in_half_precision(plan: Plan) -> None:
    """60000 times a gain of 2 has no float16: it must be divided first, or multiplied in float32."""
    x, weight = numbers(1, 70, dtype=torch.float16), numbers(45, 70, dtype=torch.float16, gain=0.1)
    x[0, 3] = 60000
    norm = Norm(torch.full((70,), 2.0, dtype=torch.float16, device=DEVICE), 1e-5)
    got = kernel.project(x, weight, norm=norm, plan=plan)
    check(got, reference.project(x.float(), weight.float(), norm=Norm(norm.weight.float(), 1e-5)))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("plan", [SMALL, CUT])
def test_rows_do_not_know_each_other(plan: Plan) -> None:
    """The same bits whatever the other rows hold, NaN included, and however many of a bucket there are."""
    x, weight = numbers(9, 70), numbers(45, 70)
    whole = kernel.project(x, weight, plan=plan)
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(kernel.project(other, weight, plan=plan)[0], whole[0])
    assert torch.equal(kernel.project(x[:2].contiguous(), weight, plan=plan), whole[:2])


def test_counters_are_left_at_zero() -> None:
    for _ in range(2):
        kernel.project(numbers(3, 70), numbers(45, 70), plan=CUT)
    assert not shared_counters(kernel.MOST_TILES, DEVICE).any()


def test_what_is_not_covered() -> None:
    x, weight = numbers(3, 70), numbers(45, 70)
    assert kernel.why_not(x, weight) is None
    assert "17 rows" in str(kernel.why_not(numbers(17, 70), weight))
    assert kernel.why_not(numbers(17, 70).half(), weight[:41].half()) is None, "no library has a good one"
    assert kernel.why_not(numbers(64, 70), weight, fused=True) is None
    assert kernel.why_not(numbers(64, 70), weight, in_pairs=True) is None
    many = torch.empty(18432, 70, device=DEVICE)  # 288 programs, of which 264 run at once
    assert "64 rows" in str(kernel.why_not(numbers(64, 70), many, fused=True))
    assert kernel.why_not(numbers(64, 70), many[:16384], fused=True) is None
    assert "float16" in str(kernel.why_not(x, weight.half()))
    assert "contiguous" in str(kernel.why_not(x, weight.mT.contiguous().mT))


@on_gpu_alone
@pytest.mark.parametrize("activation", [Activation.RELU, Activation.GELU])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_rows(dtype: torch.dtype, activation: Activation) -> None:
    """A library's; of those with a ReLU it clips the sums itself."""
    x, weight, bias = (numbers(*shape, dtype=dtype) for shape in ((300, 512), (768, 512), (768,)))
    want = reference.project(x.float(), weight.float(), bias.float(), activation=activation)
    check(ops.project(x, weight, bias, activation=activation), want)


@on_gpu_alone
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_same_bits_every_time(rows: int) -> None:
    """Programs that finish in any order add up in one: a race would show as another last bit."""
    x, weight = numbers(rows, 5504, dtype=torch.bfloat16), numbers(2048, 5504, dtype=torch.bfloat16)
    first = kernel.project(x, weight)
    assert all(torch.equal(kernel.project(x, weight), first) for _ in range(300))
