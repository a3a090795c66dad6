"""Attention over ragged rows in Triton; the reference is `math.ragged_attention`.

One program takes one key head of one row and all the queries that share it: the heads of a group and the new tokens
are folded into one axis, so a key is read once for all of them. Rows stop at their own length (SPLIT), or all at the
longest (PAD, to compare with). Where that makes too few programs to keep every multiprocessor reading, or leaves the
longest row to work alone at the end, rows are cut (KEYS): into chunks of one size for all, or, where rows differ and
the host knows by how much, all rows' keys into equal splits, wherever rows begin and end. A program leaves maximum,
sum and weighted values of a piece of a row behind, and a second, small kernel merges the pieces.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.kernels.attention.device import AttentionCase, Pool, Queries, attend_kernel, merge_kernel
from forerun.kernels.attention.shape import TUNING, AttentionTuning, LaunchShape, choose_shape, power
from forerun.kernels.launching import DTYPES, needs_upcast
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.attention import Form, Scale
from forerun.math.ragged_attention import Reach, check_bias

LARGEST_SIZE = 256  # of a head
LARGEST_LATENT = 512
# Of a latent: sixteen queries' sums are half of what registers hold, and half as many keys fit where a tile is.
WIDE = AttentionTuning(block_bytes=32768, most_queries=16)
# Of rounded keys a tile is half as many bytes: half the warps, twice the programs, where few queries share a key.
ROUNDED, ROUNDED_QUERIES = AttentionTuning(warps=2, resident=4), 16
MOST_MERGED = 8192  # numbers of pieces that a merging program holds at a time


def attend_ragged(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D] rows, or blocks that `reach.table` tells of
    values: Tensor,  # [R, Hk, C, Dv]
    reach: Reach,
    scale: Scale,
    form: Form = Form.AUTO,
    tuning: AttentionTuning | None = None,
    tail: tuple[Tensor, Tensor] | None = None,  # [N, Hq, T], [R, Hk, C, T]
) -> Tensor:  # [N, Hq, Dv]
    """Each row's queries against that row's own keys; no waiting for the device, so a CUDA graph can hold it."""
    tuning = tuning or (_tuning(query, keys, reach) if tail is None else WIDE)
    if reason := why_not(query, keys, values, tail):
        raise InvalidArgument(f"the attention kernel cannot take this: {reason}; use forerun.ops.attend_ragged")
    check_bias(reach, scale)
    shape = choose_shape(query, keys, reach, form, tuning)
    if reach.table is not None and keys.shape[2] % shape.block_keys:
        raise InvalidArgument(
            f"blocks of {keys.shape[2]} keys: the kernel reads {shape.block_keys} at a time, so give a multiple of that"
        )
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    parts = _parts(query, keys, values, reach, shape)
    _launch(out, parts, query, keys, values, reach, scale, shape, tail, tuning)
    if shape.is_cut:
        _launch_merge(out, parts, reach, scale, shape)
    return out


def why_not(query: Tensor, keys: Tensor, values: Tensor, tail: tuple[Tensor, Tensor] | None = None) -> str | None:
    """What the kernel does not cover, in words; None where it covers everything."""
    if query.dtype not in DTYPES or keys.dtype != query.dtype or values.dtype != query.dtype:
        return f"queries of {query.dtype}, keys of {keys.dtype}, values of {values.dtype}"
    if tail is not None and (keys.data_ptr() != values.data_ptr() or keys.shape != values.shape):
        return "a second part of keys beside values of their own"
    if isinstance(keys, ScaledKeys) and (tail is not None or query.shape[-1] % 2 or values.shape[-1] % 2):
        return "rounded keys of odd heads, or of latents"
    most = LARGEST_SIZE if tail is None else LARGEST_LATENT
    if max(query.shape[-1], values.shape[-1]) > most:
        return f"heads of size {max(query.shape[-1], values.shape[-1])}, more than {most}"
    if any(t.stride(-1) != 1 for t in (query, keys, values, *(tail or ()))):
        return "numbers of a head that do not lie side by side"
    return None


def _tuning(query: Tensor, keys: Tensor, reach: Reach) -> AttentionTuning:
    is_few = reach.most_tokens * query.shape[1] <= ROUNDED_QUERIES * keys.shape[1]
    return ROUNDED if is_few and isinstance(keys, ScaledKeys) else TUNING


def _parts(query: Tensor, keys: Tensor, values: Tensor, reach: Reach, shape: LaunchShape) -> tuple[Tensor, Tensor]:
    """Room for weighted values [.., Dv], maxima and sums [.., 2] of the pieces of rows that are cut."""
    if not shape.is_cut:
        return query, query  # never touched
    pieces = 2 * shape.balanced_splits or reach.slots.shape[0] * shape.splits
    place = (keys.shape[1], shape.query_blocks, pieces, shape.queries)
    return tuple(query.new_empty(*place, n, dtype=torch.float32) for n in (values.shape[-1], 2))  # type: ignore[return-value]


def _launch(
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    scale: Scale,
    shape: LaunchShape,
    tail: tuple[Tensor, Tensor] | None,
    tuning: AttentionTuning,
) -> None:
    batch, heads, tree, bias = reach.slots.shape[0], keys.shape[1], reach.tree, scale.by_distance
    table, (tail_query, tails) = reach.table, tail or (query, keys)
    scales = _scales(keys, query), _scales(values, query)
    keys_as, values_as, tails = _stored(keys), _stored(values), _stored(tails)
    size, value_size = keys_as.shape[-1], values_as.shape[-1]
    programs = (shape.balanced_splits, 1) if shape.balanced_splits else (batch, shape.splits)
    case = AttentionCase(
        HEADS=query.shape[1], GROUP=query.shape[1] // heads, SIZE=size, VALUE_SIZE=value_size,
        BLOCK_SIZE=power(size), BLOCK_VALUE_SIZE=power(value_size),
        BLOCK_QUERIES=shape.block_queries, BLOCK_KEYS=shape.block_keys, BLOCK_ROWS=shape.block_rows,
        IS_PART=shape.is_cut, BALANCED=shape.balanced_splits > 0,
        PADDED=shape.form is Form.PAD, WINDOWED=reach.window > 0, CAPPED=scale.softcap is not None,
        HAS_SINKS=scale.sinks is not None, HAS_TREE=tree is not None, ACROSS=reach.across,
        HAS_BIAS=bias is not None, UPCAST=needs_upcast(query), EARLY=shape.early,
        PAGE=0 if table is None else keys.shape[2], FAST=query.device.type != "cpu",
        CAPACITY=keys.scales.shape[2] if isinstance(keys, ScaledKeys) else 0,
        FLOATS=isinstance(keys, ScaledKeys) and keys.scheme.values.is_floating_point,
        TAIL=0 if tail is None else tails.shape[-1], BLOCK_TAIL=0 if tail is None else power(tails.shape[-1]),
    )  # fmt: skip
    attend_kernel[(heads * programs[0] * shape.query_blocks, programs[1])](
        out, *parts, Queries(query, *query.stride()[:2]),
        Pool(keys_as, *keys_as.stride()[:3]), Pool(values_as, *values_as.stride()[:3]), *scales,
        Queries(tail_query, *tail_query.stride()[:2]), Pool(tails, *tails.stride()[:3]),
        reach.slots, reach.slots if table is None else table, reach.lengths, reach.starts,
        query if scale.sinks is None else scale.sinks, query if tree is None else tree, query if bias is None else bias,
        scale.factor, scale.softcap or 1.0, 0 if tree is None else tree.stride(0), reach.window, reach.longest,
        shape.chunk, shape.splits, shape.balanced_splits, batch, shape.query_blocks,
        0 if bias is None else bias.shape[1], 0 if table is None else table.stride(0), shape.queries,
        CASE=case, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def _stored(pool: Tensor) -> Tensor:
    """As the kernel reads it: rounded numbers in pairs."""
    return pool.raw.view(torch.int16) if isinstance(pool, ScaledKeys) else pool


def _scales(pool: Tensor, other: Tensor) -> Tensor:
    return pool.scales if isinstance(pool, ScaledKeys) else other


def _launch_merge(out: Tensor, parts: tuple[Tensor, Tensor], reach: Reach, scale: Scale, shape: LaunchShape) -> None:
    batch, heads, size = reach.slots.shape[0], out.shape[1], power(out.shape[2])
    group = heads // parts[0].shape[0]
    # Sums over pieces stay within a thread, and one warp waits for no other, as long as its registers hold them.
    pieces = min(triton.next_power_of_2(shape.pieces), MOST_MERGED // size)
    is_small = pieces * size <= MOST_MERGED // 4
    # Which splits hold a row's pieces takes long enough to find out that it is done for two heads at once.
    each = 2 if shape.balanced_splits and group % 2 == 0 and is_small else 1
    merge_kernel[(heads // each * reach.most_tokens, batch)](
        out, *parts, reach.lengths, reach.starts, out if scale.sinks is None else scale.sinks,
        reach.window, reach.longest, shape.chunk, shape.splits, shape.balanced_splits, batch, shape.query_blocks,
        shape.queries,
        HEADS=heads, GROUP=group, VALUE_SIZE=out.shape[2], BLOCK_VALUE_SIZE=size, BLOCK_QUERIES=shape.block_queries,
        BLOCK_KEYS=shape.block_keys, BLOCK_ROWS=shape.block_rows, BLOCK_PIECES=pieces,
        BALANCED=shape.balanced_splits > 0, WINDOWED=reach.window > 0, CHAIN=reach.tree is None and not reach.across,
        GRAIN=1 if reach.table is None else shape.block_keys,
        HAS_SINKS=scale.sinks is not None, EARLY=shape.early, EACH=each,
        num_warps=1 if is_small else 2, **({"launch_pdl": True} if shape.early else {}),
    )  # fmt: skip
