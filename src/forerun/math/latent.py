"""Latent attention (DeepSeek-V2): keys and values of all heads are products of one small vector a token, the latent.

The cache holds latents, and beside each one key that all heads share, rotated. Keys and values of heads are never made:
a query is multiplied with its head's part of their weight first (`absorb`), attention then reads latents as keys and as
values, and what it has mixed of them goes through the other part (`expand`). `kernels.attention.latent` has the same
functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.math.attention import Scale
from forerun.math.cache_write import rotated, write
from forerun.math.prompt_attention import attend_prompt
from forerun.math.ragged_attention import keys_of, visible
from forerun.math.skinny import Norm, normed
from forerun.types import RaggedRows

PROMPT = 256  # new tokens of a row from which on keys are made: a product with a key is a third of one with a latent


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What a head consists of: P dimensions of a query that meet latents, T that are rotated, V of a value."""

    num_heads: int
    plain: int  # P
    turning: int  # T
    value: int  # V
    interleaved: bool = False  # which dimensions turn together: see `math.cache_write.rotated`
    in_halves: bool = False  # whether such pairs, once turned, are taken apart: first all lows, then all highs
    multiplier: float = 1.0  # of a latent behind its norm


def turned(states: Tensor, cos: Tensor, sin: Tensor, heads: LatentHeads) -> Tensor:
    """[N, H, T] rotated by angles [N, T]."""
    turned_states = rotated(states, cos, sin, heads.interleaved)
    if not (heads.interleaved and heads.in_halves):
        return turned_states
    return torch.cat([turned_states[..., ::2], turned_states[..., 1::2]], dim=-1)


def write_latents(
    projected: Tensor,  # [N, Q + L + T]: what queries are made of, the latent, the shared key
    query_norm: Norm | None,
    latent_norm: Norm,
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    addresses: Tensor,  # [N]
    latents: Tensor,  # [slots * capacity, 1, L], changed in place
    shared_keys: Tensor,  # [slots * capacity, 1, T], changed in place
    heads: LatentHeads,
) -> Tensor:  # [N, Q]
    """Latents, normed, and shared keys, rotated, into the cache; the first part, normed where there is a norm."""
    size, turning = latents.shape[-1], heads.turning
    query, latent, key = projected.split([projected.shape[1] - size - turning, size, turning], dim=-1)
    latent = normed(latent, latent_norm) * heads.multiplier
    write(latent[:, None], turned(key[:, None], cos, sin, heads), addresses, latents, shared_keys)
    return query if query_norm is None else normed(query, query_norm)


def absorb(
    query: Tensor,  # [N, H * (P + T)]
    weight: Tensor,  # [H * (P + V), L]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    heads: LatentHeads,
) -> tuple[Tensor, Tensor]:  # [N, H, L], [N, H, T]
    """Queries as latents meet them, and their rotated part, which meets shared keys."""
    plain, turning = query.unflatten(-1, (heads.num_heads, -1)).split([heads.plain, heads.turning], dim=-1)
    keys, _ = _parts(weight, heads)
    return torch.einsum("nhp,hpl->nhl", plain, keys), turned(turning, cos, sin, heads)


def expand(mixed: Tensor, weight: Tensor, heads: LatentHeads) -> Tensor:
    """Mixed latents [N, H, L] -> mixed values [N, H * V]."""
    _, values = _parts(weight, heads)
    return torch.einsum("nhl,hvl->nhv", mixed, values).flatten(1)


def _parts(weight: Tensor, heads: LatentHeads) -> tuple[Tensor, Tensor]:
    """[H, P, L] that makes keys, [H, V, L] that makes values."""
    keys, values = weight.unflatten(0, (heads.num_heads, -1)).split([heads.plain, heads.value], dim=1)
    return keys, values


def attend_row(
    query: Tensor,  # [n, H, L], the newest tokens of a row
    turning: Tensor,  # [n, H, T]
    latents: Tensor,  # [S, L] of the whole row
    shared_keys: Tensor,  # [S, T]
    scale: Scale,
) -> Tensor:  # [n, H, L]
    """Attention over latents, on a CPU."""
    scores = (query @ latents.T + turning @ shared_keys.T) * scale.factor
    if len(query) > 1:
        seen = visible(len(latents), len(query), 0, None, query.device)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ latents


def attend_prompts(
    query: Tensor,  # [N, H * (P + T)]
    weight: Tensor,  # [H * (P + V), L]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    latents: Tensor,  # [R, 1, C, L] every row of the cache, or every block, the new tokens written already
    shared_keys: Tensor,  # [R, 1, C, T]
    rows: RaggedRows,
    table: Tensor | None,
    scale: Scale,
    heads: LatentHeads,
) -> Tensor:  # [N, H * V]
    """Attention over keys and values that are made for it, by torch, row by row: for prompts."""
    states = query.unflatten(-1, (heads.num_heads, -1))
    turning = turned(states[..., heads.plain :], cos, sin, heads)
    states = torch.cat([states[..., : heads.plain], turning], dim=-1)
    outs, start = [], 0
    for place, (past, count) in enumerate(zip(rows.past, rows.counts, strict=True)):
        row_latents, shared = (keys_of(pool, rows, place, table)[0] for pool in (latents, shared_keys))
        expanded = F.linear(row_latents, weight).unflatten(-1, (heads.num_heads, -1)).transpose(0, 1)
        plain, values = expanded.split([heads.plain, heads.value], dim=-1)
        keys = torch.cat([plain, shared[None].expand(heads.num_heads, -1, -1)], dim=-1)
        queries = states[start : start + count].transpose(0, 1)
        mixed = attend_prompt(queries[None], keys[None], values[None], past, scale.factor)
        outs.append(mixed[0].transpose(0, 1).flatten(1))
        start += count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def why_not_prompts(rows: RaggedRows) -> str | None:
    """What keeps `attend_prompts` from being the faster one, in words; None where it is."""
    return f"rows of fewer than {PROMPT} new tokens" if min(rows.counts) < PROMPT else None
