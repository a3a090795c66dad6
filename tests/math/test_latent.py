"""Attention over latents, in all its forms, against keys and values that are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.math import latent
from forerun.math.attention import Scale
from forerun.math.latent import LatentHeads, absorb, attend_prompts, attend_row, expand, turned, write_latents
from forerun.math.ragged_attention import attend_ragged, reach_of
from forerun.math.skinny import Norm
from forerun.types import RaggedRows

ROWS = RaggedRows((2, 0), (5, 0), (9, 12))  # slots, past, counts
HEADS = LatentHeads(num_heads=4, plain=8, turning=4, value=6, interleaved=True, in_halves=True)
LATENT, SCALE = 16, Scale(0.3)


@pytest.fixture
def case() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"query": (21, 48), "weight": (56, LATENT), "latents": (3, 1, 16, LATENT), "keys": (3, 1, 16, 4)}
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**made, "cos": torch.rand(21, 4), "sin": torch.rand(21, 4)}


def by_definition(query: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, latents: Tensor, keys: Tensor) -> Tensor:
    """Every head's keys and values from their latents, then plain attention."""
    states = query.unflatten(-1, (4, 12))
    states = torch.cat([states[..., :8], turned(states[..., 8:], cos, sin, HEADS)], dim=-1)
    made = torch.einsum("rcl,hdl->rhcd", latents[:, 0], weight.unflatten(0, (4, 14)))
    whole = torch.cat([made[..., :8], keys.expand(-1, 4, -1, -1)], dim=-1)
    return attend_ragged(states, whole, made[..., 8:], reach_of(ROWS, query.device), SCALE).flatten(1)


def test_absorbed_queries(case: dict[str, Tensor]) -> None:
    query, turning = absorb(case["query"], case["weight"], case["cos"], case["sin"], HEADS)
    latents, keys = case["latents"], case["keys"]
    reach = reach_of(ROWS, query.device)
    mixed = attend_ragged(query, latents, latents, reach, SCALE, tail=(turning, keys))
    torch.testing.assert_close(expand(mixed, case["weight"], HEADS), by_definition(**case))
    rows = [(2, slice(0, 9), 14), (0, slice(9, 21), 12)]
    alone = [attend_row(query[t], turning[t], latents[s, 0, :n], keys[s, 0, :n], SCALE) for s, t, n in rows]
    torch.testing.assert_close(torch.cat(alone), mixed)
    other = attend_ragged(query, latents, latents, reach, SCALE, tail=(turning.flip(-1), keys))
    assert not torch.allclose(other, mixed, atol=0.1), "the shared key must count"


@pytest.mark.parametrize("paged", [False, True])
def test_prompts(paged: bool, case: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fewer" in str(latent.why_not_prompts(ROWS))
    monkeypatch.setattr(latent, "PROMPT", 9)
    assert latent.why_not_prompts(ROWS) is None
    want, table = by_definition(**case), None
    if paged:
        order = torch.randperm(12)
        table = order.argsort().view(3, 4).int()
        for name in ("latents", "keys"):
            case[name] = case[name].view(3, 1, 4, 4, -1).transpose(1, 2).flatten(0, 1)[order]
    query, weight, latents, keys, cos, sin = case.values()
    got = attend_prompts(query, weight, cos, sin, latents, keys, ROWS, table, SCALE, HEADS)
    torch.testing.assert_close(got, want)


def test_what_is_written() -> None:
    torch.manual_seed(1)
    made, cos, sin = torch.randn(3, 10 + LATENT + 4), torch.rand(3, 4), torch.rand(3, 4)
    latents, keys = torch.zeros(8, 1, LATENT), torch.zeros(8, 1, 4)
    norms = Norm(torch.rand(10), 1e-6), Norm(torch.rand(LATENT), 1e-6)
    query = write_latents(made, *norms, cos, sin, torch.tensor([6, 1, 3]), latents, keys, HEADS)
    want = torch.nn.functional.rms_norm(made[:, :10], (10,), norms[0].weight, 1e-6)
    torch.testing.assert_close(query, want)
    want = torch.nn.functional.rms_norm(made[:, 10:-4], (LATENT,), norms[1].weight, 1e-6)
    torch.testing.assert_close(latents[[6, 1, 3], 0], want)
    low, high = made[:, -4::2], made[:, -3::2]
    c, s = cos[:, :2], sin[:, :2]
    torch.testing.assert_close(keys[[6, 1, 3], 0], torch.cat([low * c - high * s, high * c + low * s], dim=-1))
    assert not latents[[0, 2, 4, 5, 7]].any() and not keys[[0, 2, 4, 5, 7]].any()
