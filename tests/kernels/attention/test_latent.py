"""`kernels.attention.latent`, and attention with a second part of keys, against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forerun.errors import InvalidArgument
from forerun.kernels.attention import attend as attend_kernel
from forerun.kernels.attention import latent as kernel
from forerun.math import latent as reference
from forerun.math import ragged_attention
from forerun.math.attention import Form, Scale
from forerun.math.latent import LatentHeads
from forerun.math.ragged_attention import reach_of
from forerun.math.skinny import Norm
from forerun.types import RaggedRows
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

LATENT = 40
KINDS = {
    "halves": LatentHeads(3, 24, 8, 20),
    "pairs": LatentHeads(3, 24, 8, 20, interleaved=True),
    "pairs to halves": LatentHeads(3, 24, 8, 20, interleaved=True, in_halves=True),
    "multiplied": LatentHeads(3, 24, 8, 20, multiplier=1.7),
}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.quick("True-pairs to halves", "False-multiplied")
def test_write_latents(kind: str, has_norm: bool) -> None:
    torch.manual_seed(0)
    heads, made, cos, sin = KINDS[kind], rand(3, 30 + LATENT + 8), rand(3, 8), rand(3, 8)
    if not heads.interleaved:  # angles of both halves are the same in every family
        cos, sin = (torch.cat([half[:, :4]] * 2, dim=-1) for half in (cos, sin))
    norms = Norm(rand(30), 1e-5) if has_norm else None, Norm(rand(LATENT), 1e-6)
    where = torch.tensor([4, 0, 2], device=DEVICE)
    got, want = ((torch.zeros(6, 1, LATENT, device=DEVICE), torch.zeros(6, 1, 8, device=DEVICE)) for _ in range(2))
    query = kernel.write_latents(made, *norms, cos, sin, where, *got, heads)
    torch.testing.assert_close(query, reference.write_latents(made, *norms, cos, sin, where, *want, heads))
    for own, right in zip(got, want, strict=True):
        torch.testing.assert_close(own, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.quick("19-pairs to halves", "1-halves")
def test_absorb_and_expand(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    heads, weight, angle = KINDS[kind], rand(3 * 44, LATENT), rand(rows, 4).repeat(1, 2)
    query = rand(rows, 3 * 32 + 5)[:, : 3 * 32]  # as it lies beside latents where nothing stands between
    args = (weight, angle.cos(), angle.sin(), heads)
    for own, right in zip(kernel.absorb(query, *args), reference.absorb(query, *args), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)
    mixed = rand(rows, 3, LATENT)
    right = reference.expand(mixed, weight, heads)
    torch.testing.assert_close(kernel.expand(mixed, weight, heads), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [Form.SPLIT, Form.KEYS])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.quick("True-keys")
def test_attention_over_latents(form: Form, paged: bool) -> None:
    torch.manual_seed(0)
    rows = RaggedRows((1, 0), (130, 3), (2, 3))
    query, tail, latents, keys = rand(5, 5, LATENT), rand(5, 5, 8), rand(2, 1, 256, LATENT), rand(2, 1, 256, 8)
    reach = reach_of(rows, DEVICE)
    if paged:
        order = torch.tensor([3, 0, 2, 1], device=DEVICE)
        latents, keys = (t.view(2, 1, 2, 128, -1).transpose(1, 2).flatten(0, 1)[order] for t in (latents, keys))
        reach = replace(reach, table=order.argsort().view(2, 2).int())
    scale = Scale(0.2)
    want = ragged_attention.attend_ragged(query, latents, latents, reach, scale, tail=(tail, keys))
    got = attend_kernel.attend_ragged(query, latents, latents, reach, scale, form, tail=(tail, keys))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    wrong = attend_kernel.attend_ragged(query, latents, latents, reach, scale, form, tail=(tail.flip(-1), keys))
    assert not torch.allclose(wrong, want, atol=1e-2)


def test_values_of_their_own_are_refused() -> None:
    query, latents, keys = rand(1, 4, LATENT), rand(1, 1, 32, LATENT), rand(1, 1, 32, 8)
    reach = reach_of(RaggedRows((0,), (3,), (1,)), DEVICE)
    with pytest.raises(InvalidArgument, match="values of their own"):
        attend_kernel.attend_ragged(query, latents, latents.clone(), reach, Scale(1.0), tail=(rand(1, 4, 8), keys))
