"""The one place that chooses between a kernel and its reference.

A kernel has its reference's name and signature and goes behind the same function. `use` is the choice of the decoder
that calls, for all of a round alike; where it is None, $FORERUN_KERNELS decides. A kernel that turns out not to compile
here is told of once, and its reference runs from then on (`or_reference`); those without `use` are parts of fused
layers, in whose place the model's own modules run (`Scorer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from forerun import kernels
from forerun.config import Kernels, SamplingParams
from forerun.config import kernels as kernels_asked
from forerun.kernels.fallback import or_reference, refused
from forerun.kernels.scaled import ScaledWeight, product
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math import advance as advance_reference
from forerun.math import attention as attention_reference
from forerun.math import cache_write as cache_write_reference
from forerun.math import experts as experts_reference
from forerun.math import latent as latent_reference
from forerun.math import laws as laws_reference
from forerun.math import ngram as ngram_reference
from forerun.math import penalties as penalties_reference
from forerun.math import ragged_attention as ragged_attention_reference
from forerun.math import random as random_reference
from forerun.math import row_options as row_options_reference
from forerun.math import sample as sample_reference
from forerun.math import skinny as skinny_reference
from forerun.math import tree as tree_reference
from forerun.math import verify as verify_reference
from forerun.math.advance import DeviceRowState, PassLayout
from forerun.math.attention import AttentionPlan, Form, Scale
from forerun.math.experts import ExpertWeights
from forerun.math.latent import LatentHeads
from forerun.math.ngram import NgramDraft, Ngrams
from forerun.math.ragged_attention import Reach
from forerun.math.routing import Router
from forerun.math.row_options import RowOptions
from forerun.math.sample import Sample
from forerun.math.scaled import RoundedRows, RoundedWeight, Scheme, rounded_rows
from forerun.math.skinny import Activation, Heads, LayerNorm, Norm
from forerun.math.verify import CustomRule, TargetLaw
from forerun.types import Draft, Keys, LawParams, Rule, Verdict


def attend(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, Dv]
    plan: AttentionPlan,
    scale: Scale,
) -> Tensor:  # [N, Hq, Dv]
    """Attention of each row's new tokens over that row's own keys; see `forerun.math.attention.attend`."""
    return attention_reference.attend(query, keys, values, plan, scale)


@or_reference
def attend_across(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, Dv]
    plan: AttentionPlan,
    scale: Scale,
    use: Kernels = Kernels.AUTO,
) -> Tensor:  # [N, Hq, Dv]
    """Cross-attention as `plan_across` lays it out; see `forerun.math.attention.attend`."""
    if use is not Kernels.OFF and query.device.type == "cpu" and not kernels.why_not_numba():
        from forerun.kernels.cpu import cross_attention, threads

        is_covered = cross_attention.why_not(query, keys, values, scale) is None
        if is_covered and (use is Kernels.ON or cross_attention.is_faster(*keys.shape[1::2])):
            return cross_attention.attend_across(query, keys, values, plan, scale, threads.most_threads())
    return attention_reference.attend(query, keys, values, plan, scale)


@or_reference
def attend_ragged(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [R, Hk, C, D]
    values: Tensor,  # [R, Hk, C, Dv]
    reach: Reach,
    scale: Scale,
    form: Form = Form.AUTO,
    use: Kernels = Kernels.AUTO,
    tail: tuple[Tensor, Tensor] | None = None,  # [N, Hq, T], [R, Hk, C, T]
) -> Tensor:  # [N, Hq, Dv]
    """The same over rows whose lengths the device knows; see `forerun.math.ragged_attention.attend_ragged`."""
    if why_not_ragged(query, keys, values, use, tail) is None:
        from forerun.kernels.attention import attend as kernel

        return kernel.attend_ragged(query, keys, values, reach, scale, form, tail=tail)
    return ragged_attention_reference.attend_ragged(query, keys, values, reach, scale, form, tail)


def why_not_ragged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    use: Kernels = Kernels.AUTO,
    tail: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why no kernel does it; None where one does. Without one `attend` is faster than this function's reference."""
    if reason := why_not_triton(query.device, use):
        return reason
    if attend_ragged.__name__ in refused:
        return "its kernel could not be built"
    from forerun.kernels.attention import attend as kernel

    return kernel.why_not(query, keys, values, tail)


def why_not_triton(device: torch.device, use: Kernels = Kernels.AUTO) -> str | None:
    """Why Triton's kernels are not used on a device; None where they are."""
    return "kernels are off" if use is Kernels.OFF else kernels.why_not_triton(device)


@or_reference
def write(
    keys: Tensor,  # [N, Hk, D]
    values: Tensor,  # [N, Hk, Dv]
    addresses: Tensor,  # [N]
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
    use: Kernels = Kernels.AUTO,
) -> None:
    """New keys and values into the cache; see `forerun.math.cache_write.write`."""
    if not why_not_triton(keys.device, use):
        from forerun.kernels.attention import cache_write as kernel

        if kernel.why_not(keys, key_pool) is None and kernel.why_not(values, value_pool) is None:
            return kernel.write(keys, values, addresses, key_pool, value_pool)
    return cache_write_reference.write(keys, values, addresses, key_pool, value_pool)


@or_reference
def rotate_and_write(
    query: Tensor,  # [N, Hq, D] before rotation
    keys: Tensor,  # [N, Hk, D] before rotation
    values: Tensor,  # [N, Hk, Dv]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    addresses: Tensor,  # [N]
    key_pool: Tensor,  # [slots * capacity, Hk, D], changed in place
    value_pool: Tensor,  # [slots * capacity, Hk, Dv], changed in place
    interleaved: bool = False,
    use: Kernels = Kernels.AUTO,
) -> Tensor:  # [N, Hq, D] rotated
    """Rotate queries and keys, write keys and values; see `forerun.math.cache_write.rotate_and_write`."""
    new = (query, keys, values, cos, sin, addresses, key_pool, value_pool, interleaved)
    if not why_not_triton(query.device, use):
        from forerun.kernels.attention import cache_write as kernel

        if kernel.why_not(query, keys, values, key_pool, value_pool, angles=(cos, sin)) is None:
            return kernel.rotate_and_write(*new)
    return cache_write_reference.rotate_and_write(*new)


def write_latents(
    projected: Tensor,  # [N, Q + L + T]
    query_norm: Norm | None,
    latent_norm: Norm,
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    addresses: Tensor,  # [N]
    latents: Tensor,  # [slots * capacity, 1, L], changed in place
    shared_keys: Tensor,  # [slots * capacity, 1, T], changed in place
    heads: LatentHeads,
) -> Tensor:  # [N, Q]
    """Latents and shared keys into the cache, what queries are made of normed; see `forerun.math.latent`."""
    new = (projected, query_norm, latent_norm, cos, sin, addresses, latents, shared_keys, heads)
    if not why_not_triton(projected.device):
        from forerun.kernels.attention import latent as kernel

        if kernel.why_not(projected, latents, shared_keys) is None:
            return kernel.write_latents(*new)
    return latent_reference.write_latents(*new)


def absorb(
    query: Tensor,  # [N, H * (P + T)]
    weight: Tensor,  # [H * (P + V), L]
    cos: Tensor,  # [N, T]
    sin: Tensor,  # [N, T]
    heads: LatentHeads,
) -> tuple[Tensor, Tensor]:  # [N, H, L], [N, H, T]
    """Queries as latents meet them, and their rotated part; see `forerun.math.latent.absorb`."""
    if not why_not_triton(query.device):
        from forerun.kernels.attention import latent as kernel

        if kernel.why_not(query, weight) is None:
            return kernel.absorb(query, weight, cos, sin, heads)
    return latent_reference.absorb(query, weight, cos, sin, heads)


def expand(mixed: Tensor, weight: Tensor, heads: LatentHeads) -> Tensor:
    """Mixed latents [N, H, L] -> mixed values [N, H * V]; see `forerun.math.latent.expand`."""
    if not why_not_triton(mixed.device):
        from forerun.kernels.attention import latent as kernel

        if kernel.why_not(mixed, weight) is None:
            return kernel.expand(mixed, weight, heads)
    return latent_reference.expand(mixed, weight, heads)


def project(
    x: Tensor | RoundedRows,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [R, N]
    activation: Activation = Activation.NONE,
    multiplier: float = 1.0,
) -> Tensor:  # [R, N]
    """A product with what stands around it in a layer; see `forerun.math.skinny.project`."""
    has_more = activation is not Activation.NONE or residual is not None or multiplier != 1
    if not _why_not_few_rows(x, weight, fused=has_more and x.dtype is not torch.float32):
        from forerun.kernels.linear import project as kernel

        return kernel.project(x, weight, bias, norm, residual, activation, multiplier)
    product = _linear(x, weight, bias, norm, activation)
    product = product if multiplier == 1 else multiplier * product
    return product if residual is None else residual + product


def project_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`project` without norm and residual, left in `out` [R, N]: a library's product needs no other memory."""
    is_plain = type(weight) in (Tensor, Parameter)  # rounded ones bring products of their own
    if bias is None and is_plain and out.dtype == x.dtype == weight.dtype and _why_not_few_rows(x, weight):
        torch.mm(x, weight.T, out=out)
    else:
        out.copy_(project(x, weight, bias))


def gate(
    x: Tensor | RoundedRows,  # [R, K]
    weight: Tensor,  # [2 N, K]
    norm: Norm | None = None,
    bias: Tensor | None = None,  # [2 N]
    activation: Activation = Activation.SILU,
) -> Tensor:  # [R, N]
    """The gated half of an MLP; see `forerun.math.skinny.gate`."""
    if not _why_not_few_rows(x, weight, in_pairs=True):
        from forerun.kernels.linear import project as kernel

        return kernel.gate(x, weight, norm, bias, activation)
    return gated(_linear(x, weight, bias, norm), activation)


def project_heads(
    x: Tensor | RoundedRows, weight: Tensor, bias: Tensor | None, norm: Norm | None, heads: Heads
) -> Tensor:
    """Rotated queries [R, Hq, D]; keys and values are written. See `forerun.math.skinny.project_heads`."""
    is_plain = heads.query_norm is None and not isinstance(
        heads.key_pool, ScaledKeys
    )  # else a head is taken as a whole
    if is_plain and not _why_not_few_rows(x, weight):
        from forerun.kernels.linear import project as kernel

        return kernel.project_heads(x, weight, bias, norm, heads)
    return write_heads(project(x, weight, bias, norm), heads)


def write_heads(projected: Tensor, heads: Heads) -> Tensor:
    """Rotated queries [R, Hq, D] of a product; keys and values are written. See `forerun.math.skinny.write_heads`."""
    if not why_not_triton(projected.device):
        from forerun.kernels.attention import cache_write as kernel

        if kernel.why_not_heads(projected, heads) is None:
            return kernel.write_heads(projected, heads)
    return skinny_reference.write_heads(projected, heads)


def _linear(
    x: Tensor | RoundedRows,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation = Activation.NONE,
) -> Tensor:
    """A product by a library, or by the reference, and what its outputs go through."""
    if isinstance(x, RoundedRows):
        assert norm is None and isinstance(weight, ScaledWeight)
        return skinny_reference.activated(product(x, weight, bias), activation)
    x = x if norm is None else normed(x, norm)
    if activation is Activation.RELU and bias is not None and x.is_cuda and type(weight) in (Tensor, Parameter):
        # cuBLAS clips sums before it writes them. A gelu would see sums that are not rounded yet: other numbers.
        return torch._addmm_activation(bias, x, weight.T)
    return skinny_reference.activated(F.linear(x, weight, bias), activation)


def run_experts(
    x: Tensor,  # [N, H]
    router: Router | None,
    route: Callable[[Tensor], tuple[Tensor, Tensor]],
    weights: ExpertWeights,
    library: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
) -> Tensor:  # [N, H]
    """A mixture of experts; see `forerun.math.experts.run_experts`. Of many rows the `library` makes the same.

    `route` is the model's own router: shares [N, k] and chosen experts [N, k]; `router` says what it does. Without a
    library many rows are taken some at a time, each lot reading the experts that it has chosen.
    """
    if not why_not_triton(x.device):
        from forerun.kernels.linear import experts as kernel
        from forerun.kernels.linear import routing

        if kernel.why_not(x, weights) is None:
            if router is not None and routing.why_not(x, router) is None:
                return kernel.run_experts(x, routing.route(x, router), weights)
            shares, chosen = route(x)
            return kernel.run_experts(x, routing.sort_pairs(chosen, shares, len(weights.first)), weights)
        if library is None and len(x) > kernel.MOST_ROWS:
            lots = x.split(kernel.MOST_ROWS)
            if router is not None:
                return torch.cat([run_experts(lot, router, route, weights, None) for lot in lots])
            shares, chosen = (part.split(kernel.MOST_ROWS) for part in route(x))  # once: it may know these very rows
            return torch.cat([_run_routed(*lot, weights) for lot in zip(lots, shares, chosen, strict=True)])
        shares, chosen = route(x)
        if library is not None:
            return library(x, chosen, shares)
        return experts_reference.run_experts(x, chosen, shares, weights)
    shares, chosen = route(x)
    return experts_reference.run_experts(x, chosen, shares, weights)


def _run_routed(x: Tensor, shares: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
    """The same of rows whose experts are known."""
    return run_experts(x, None, lambda _: (shares, chosen), weights, None)


def normed(x: Tensor, norm: Norm | LayerNorm) -> Tensor:
    """The norm of each row, [.., H]; see `forerun.math.skinny.normed`."""
    if not why_not_triton(x.device):
        from forerun.kernels.linear import norms as kernel

        if kernel.why_not(x, norm) is None:
            return kernel.normed(x, norm)
    return skinny_reference.normed(x, norm)


def added(
    x: Tensor,  # [N, H]
    change: Tensor,  # [N, H]
    norm: Norm | LayerNorm | None,
    first: Norm | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A residual sum with the norms before and behind it; see `forerun.math.skinny.added`."""
    if not why_not_triton(x.device):
        from forerun.kernels.linear import norms as kernel

        if kernel.why_not(x, norm, first) is None:
            return kernel.added(x, change, norm, first, multiplier)
    return skinny_reference.added(x, change, norm, first, multiplier)


def normed_and_rounded(x: Tensor, norm: Norm | LayerNorm, scheme: Scheme) -> RoundedRows:
    """The norm of each row, [N, H], as a product with rounded weights takes it."""
    if not why_not_triton(x.device):
        from forerun.kernels.linear import norms as kernel

        if kernel.why_not(x, norm) is None:
            return kernel.normed_and_rounded(x, norm, scheme)
    return RoundedRows(*rounded_rows(skinny_reference.normed(x, norm), scheme), x.dtype)


def added_and_rounded(
    x: Tensor, change: Tensor, norm: Norm | LayerNorm, first: Norm | None, multiplier: float, scheme: Scheme
) -> tuple[Tensor, RoundedRows]:
    """`added` with a norm, of which the second result is rounded."""
    if not why_not_triton(x.device):
        from forerun.kernels.linear import norms as kernel

        if kernel.why_not(x, norm, first) is None:
            return kernel.added_and_rounded(x, change, norm, first, multiplier, scheme)
    total, inner = skinny_reference.added(x, change, norm, first, multiplier)
    return total, RoundedRows(*rounded_rows(inner, scheme), x.dtype)


def gated(pairs: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """[N, 2 I] -> [N, I]; see `forerun.math.skinny.gated`."""
    if not why_not_triton(pairs.device):
        from forerun.kernels.launching import DTYPES
        from forerun.kernels.linear import norms as kernel

        if pairs.dtype in DTYPES:
            return kernel.gated(pairs, activation)
    return skinny_reference.gated(pairs, activation)


def _why_not_few_rows(
    x: Tensor | RoundedRows, weight: Tensor, fused: bool = False, in_pairs: bool = False
) -> str | None:
    """Why the library multiplies; None where the rows are few enough for a kernel to be faster."""
    if reason := why_not_triton(weight.device):
        return reason
    from forerun.kernels.linear import measured
    from forerun.kernels.linear import project as kernel

    if reason := kernel.why_not(x, weight, fused, in_pairs):
        return reason
    is_plain = isinstance(x, Tensor) and not isinstance(weight, RoundedWeight)
    if is_plain and measured.prefers_library(len(x), weight, in_pairs):
        return "the library's product was measured faster on this device"
    return None


@or_reference
def verify(
    target: TargetLaw,
    draft: Draft,
    rule: Rule | CustomRule,
    keys: Keys,
    all_greedy: bool = False,
    use: Kernels | None = None,
) -> Verdict:
    """How much of each draft survives, and what follows; see `forerun.math.verify.verify`."""
    if _on_gpu(draft.lengths, use):
        from forerun.kernels.verify import verify as kernel

        is_covered = kernel.why_not(target, draft, rule, all_greedy) is None
        if isinstance(target, laws_reference.LogitLaw) and is_covered:
            return kernel.verify(target, draft, rule, keys, all_greedy)
    return verify_reference.verify(target, draft, rule, keys, all_greedy)


@or_reference
def verify_tree(target: TargetLaw, draft: Draft, keys: Keys, use: Kernels | None = None) -> Verdict:
    """The path of each tree that survives, and what follows; see `forerun.math.tree.verify_tree`."""
    noise = None
    if _on_gpu(draft.lengths, use):
        from forerun.kernels import random
        from forerun.kernels.verify import tree as kernel

        if isinstance(target, laws_reference.LogitLaw) and kernel.why_not(target, draft) is None:
            return kernel.verify_tree(target, draft, keys)
        noise = random.noise(keys, draft.width)
    return tree_reference.verify_tree(target, draft, keys, noise)


@or_reference
def sample(logits: Tensor, params: LawParams, uniforms: Tensor, use: Kernels | None = None) -> Sample:
    """A draft's tokens from its logits, one a row; see `forerun.math.sample.sample`."""
    if _on_gpu(logits, use):
        from forerun.kernels.verify import sample as kernel

        if kernel.why_not(logits) is None:
            return kernel.sample(logits, params, uniforms)
    return sample_reference.sample(logits, params, uniforms)


@or_reference
def draft_ngrams(
    table: Ngrams,
    recent: Tensor,  # [R, W]
    known: Tensor,  # [R]
    params: LawParams,
    uniforms: Tensor,  # [R, K]
    use: Kernels | None = None,
) -> NgramDraft:
    """A draft from n-gram counts; see `forerun.math.ngram.draft_ngrams`."""
    if _on_gpu(recent, use):
        from forerun.kernels import ngram as kernel

        return kernel.draft_ngrams(table, recent, known, params, uniforms)
    return ngram_reference.draft_ngrams(table, recent, known, params, uniforms)


@or_reference
def draft_uniforms(keys: Keys, width: int, rule: object, use: Kernels | None = None) -> Tensor:
    """The numbers a draft is drawn with; see `forerun.math.random.draft_uniforms`."""
    if _on_gpu(keys.seed, use) and width:
        from forerun.kernels import random as kernel

        return kernel.draft_uniforms(keys, width, rule)
    return random_reference.draft_uniforms(keys, width, rule)


@or_reference
def draft_lengths(asked: Tensor, budget: Tensor, position: Tensor, most: int, use: Kernels | None = None) -> Tensor:
    """Draft lengths within what a budget has left; see `forerun.math.advance.draft_lengths`."""
    if _on_gpu(asked, use):
        from forerun.kernels import advance as kernel

        return kernel.draft_lengths(asked, budget, position, most)
    return advance_reference.draft_lengths(asked, budget, position, most)


@or_reference
def lay_out(
    slots: Tensor,
    past: Tensor,
    count: int,
    number: int,
    capacity: int,
    limit: int,
    table: Tensor | None = None,
    use: Kernels | None = None,
) -> PassLayout:
    """Where new tokens of several passes go; see `forerun.math.advance.lay_out`."""
    if _on_gpu(slots, use):
        from forerun.kernels import advance as kernel

        return kernel.lay_out(slots, past, count, number, capacity, limit, table)
    return advance_reference.lay_out(slots, past, count, number, capacity, limit, table)


@or_reference
def advance(
    state: DeviceRowState,
    drafted: Tensor,
    verdict: Verdict,
    vocab_size: int,
    counts: Tensor | None = None,
    use: Kernels | None = None,
) -> None:
    """Rows to the end of what they gained; see `forerun.math.advance.advance`."""
    if _on_gpu(drafted, use):
        from forerun.kernels import advance as kernel

        return kernel.advance(state, drafted, verdict, vocab_size, counts)
    return advance_reference.advance(state, drafted, verdict, vocab_size, counts)


@or_reference
def adjust(
    logits: Tensor,  # [n, V] consecutive positions of one row
    prompt: Sequence[int],
    output: Sequence[int] | Counter[int],
    drafted: Sequence[int],
    params: SamplingParams,
    forbid: Sequence[int] = (),
    min_new_tokens: int = 0,
    use: Kernels | None = None,
) -> Tensor:
    """Bias and penalties along a draft; see `forerun.math.penalties.adjust`."""
    if _on_gpu(logits, use):
        from forerun.kernels import penalties as kernel

        if kernel.why_not(logits) is None:
            return kernel.adjust(logits, prompt, output, drafted, params, forbid, min_new_tokens)
    return penalties_reference.adjust(logits, prompt, output, drafted, params, forbid, min_new_tokens)


@or_reference
def adjust_rows(
    logits: Tensor,  # [R * n, V] n consecutive positions of every row
    options: RowOptions,
    position: Tensor,
    drafted: Tensor,
    first: int = 0,
    ids: Tensor | None = None,
    use: Kernels | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Bias, penalties and bans of rows that the device knows; see `forerun.math.row_options.adjust_rows`."""
    if _on_gpu(logits, use):
        from forerun.kernels import penalties as kernel

        if kernel.why_not(logits) is None:
            return kernel.adjust_rows(logits, options, position, drafted, first, ids, seen)
    return row_options_reference.adjust_rows(logits, options, position, drafted, first, ids, seen)


def _on_gpu(tensor: Tensor, use: Kernels | None) -> bool:
    """Whether Triton's kernels may be used for what lies where `tensor` does."""
    return tensor.is_cuda and kernels_asked(use) is not Kernels.OFF and kernels.why_not_triton(tensor.device) is None


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverse CDF; see `forerun.math.laws.draw`."""
    return laws_reference.draw(weights, uniforms)


@or_reference
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, use: Kernels = Kernels.AUTO) -> Tensor:
    """x @ weight.T (+ bias), [.., K] and [M, K] -> [.., M]; on a CPU by our own product where that is faster."""
    if use is Kernels.OFF or x.device.type != "cpu" or x.dtype != weight.dtype or kernels.why_not_numba():
        return F.linear(x, weight, bias)  # a weight that is stored narrow brings a product of its own
    from forerun.kernels.cpu import choice, linear, threads

    if linear.why_not(weight) or x.shape[-1] != weight.shape[1]:  # torch says what is wrong
        return F.linear(x, weight, bias)
    if use is Kernels.AUTO and not choice.is_faster(weight, x.shape[:-1].numel()):
        return F.linear(x, weight, bias)
    return linear.linear(x, weight, bias, threads.most_threads())


@or_reference
def prefers_own_linear(weight: Tensor, rows: int, use: Kernels = Kernels.AUTO) -> bool:
    """Whether `linear` takes our own product, which can take this weight: timing it compiles it."""
    if use is not Kernels.AUTO:
        return use is Kernels.ON
    from forerun.kernels.cpu import choice

    return choice.is_faster(weight, rows)
