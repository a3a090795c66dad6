"""Verification: how many draft tokens the target keeps, and the token that follows them.

`p` is the target's law and `q` the draft's, as in Leviathan et al. (arXiv:2211.17192). Every rule in this file is
lossless: what is emitted follows p, whatever q is. Lossy ones bring their own `decide` (`forerun.math.lossy`).
Positions past a row's length are garbage and change nothing.

Where the target has no law, because its logits are not numbers or allow no token, a row fails if it comes there, as it
would without a draft. A draft that leads past such a position ends before it: then the block rule, whose tests look one
position ahead, asks only about laws that there are, and what does not come there follows p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.math.laws import draw, tile_sums
from forerun.math.random import Draws, RandomStream, span, uniforms
from forerun.types import Draft, Keys, Law, Rule, Verdict


class TargetLaw(Law, Protocol):
    """The target's law at every draft position and one more, which knows where its logits are none."""

    @property
    def greedy(self) -> Tensor:
        """Rows whose law is one-hot by their temperature: [B] bool."""
        ...

    def draw(self, position: Tensor, u: Tensor) -> Tensor:
        """One token a row from the law at `position`: [B] each."""
        ...

    @property
    def usable(self) -> Tensor:
        """Where the logits hold no NaN or +inf and allow some token: [B, K + 1] bool."""
        ...


@dataclass(frozen=True, slots=True)
class Noise:
    """The uniforms of one round."""

    accept: Tensor  # [B, K] float64, one a draft token
    final: Tensor  # [B, K + 1] float64, for the token drawn at each position the round may end at
    choice: Tensor | None = None  # [B, K] float64, for rules that draw a candidate at each position


@dataclass(frozen=True, slots=True)
class Decision:
    """What a lossy rule decides."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64
    tokens: Tensor | None = None  # [B, K] int64, emitted in place of the draft's own


class CustomRule(Protocol):
    """A rule that is a value with parameters, and not one of `Rule`."""

    def decide(self, target: TargetLaw, draft: Draft, noise: Noise) -> Decision:
        """Decide about rows that sample, where some row has a draft; the answer for greedy rows is ignored."""
        ...


def verify(target: TargetLaw, draft: Draft, rule: Rule | CustomRule, keys: Keys, all_greedy: bool = False) -> Verdict:
    """Verify a draft. With `all_greedy` every row's target law is one-hot, and no random number is needed."""
    tokens = None
    num_usable = kept_prefix(target.usable, draft.lengths + 1)
    draft = replace(draft, lengths=torch.minimum(draft.lengths, num_usable))
    if all_greedy:
        num_accepted, next_token = one_hot_rule(target, draft)
    elif isinstance(rule, Rule):
        num_accepted, next_token = RULES[rule](target, draft, noise_of(keys, draft.width, rule))
    elif not draft.width:  # nothing to verify: the target draws, as under any rule
        num_accepted, next_token = token_rule(target, draft, noise_of(keys, 0, Rule.TOKEN))
    else:
        decision = rule.decide(target, draft, noise_of(keys, draft.width, rule))
        decision = _exact_where_greedy(target, draft, decision)
        num_accepted, next_token, tokens = decision.num_accepted, decision.next_token, decision.tokens
    return Verdict(num_accepted, next_token, num_accepted < num_usable, tokens)


def _exact_where_greedy(target: TargetLaw, draft: Draft, decision: Decision) -> Decision:
    """A greedy row gets the target's greedy text whatever the rule, beside rows that sample as well as alone."""
    greedy = target.greedy
    if not bool(greedy.any()):
        return decision
    num_accepted, next_token = one_hot_rule(target, draft)
    return Decision(
        torch.where(greedy, num_accepted, decision.num_accepted),
        torch.where(greedy, next_token, decision.next_token),
        None if decision.tokens is None else torch.where(greedy.unsqueeze(-1), draft.tokens, decision.tokens),
    )


def noise_of(keys: Keys, width: int, rule: Rule | CustomRule) -> Noise:
    """All random numbers of one round, from one evaluation."""
    if rule is Rule.COUPLED:
        numbers = uniforms(keys, span(RandomStream.TARGET, width + 1))
        return Noise(numbers[:, :width], numbers)
    if isinstance(rule, Rule):
        both = uniforms(keys, _accept_and_final(width))
        return Noise(both[:, :width], both[:, width:])
    accept, final, choice = uniforms(keys, _with_choice(width)).split((width, width + 1, width), dim=-1)
    return Noise(accept, final, choice)


@lru_cache(maxsize=256)
def _accept_and_final(width: int) -> Draws:
    return span(RandomStream.ACCEPT, width) + span(RandomStream.FINAL, width + 1)


@lru_cache(maxsize=256)
def _with_choice(width: int) -> Draws:
    return _accept_and_final(width) + span(RandomStream.CHOICE, width)


def one_hot_rule(target: TargetLaw, draft: Draft) -> tuple[Tensor, Tensor]:
    """What every rule comes to where the target's law is one-hot: tokens are kept as long as they are the target's."""
    num_accepted = kept_prefix(target.of(draft.tokens) > 0, draft.lengths)
    return num_accepted, target.draw(num_accepted, torch.zeros_like(num_accepted, dtype=torch.float64))


def token_rule(target: TargetLaw, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    """Modified rejection sampling: each token is kept with probability min(1, p / q), up to the first that is not."""
    if not draft.width:
        num_accepted = torch.zeros_like(draft.lengths)
        return num_accepted, _finish(target, draft, num_accepted, None, noise)
    p, q = target.of(draft.tokens), draft.law.of(draft.tokens)
    num_accepted = count_accepted(p, q, noise.accept, draft.lengths)
    return num_accepted, _finish(target, draft, num_accepted, None, noise)


def block_rule(target: TargetLaw, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al., arXiv:2403.10444): the longest prefix that its own test keeps."""
    weight = block_weights(target.of(draft.tokens), draft.law.of(draft.tokens))
    chance = block_chances(weight, _excess(target, draft, weight), draft.lengths)
    column = torch.arange(1, draft.width + 1, device=weight.device)
    passed = (column <= draft.lengths.unsqueeze(-1)) & (noise.accept < chance)
    num_accepted = pad(torch.where(passed, column, 0), (1, 0)).amax(dim=-1)
    return num_accepted, _finish(target, draft, num_accepted, pad(weight, (1, 0), value=1.0), noise)


def coupled_rule(target: TargetLaw, draft: Draft, noise: Noise) -> tuple[Tensor, Tensor]:
    """The target draws its own token at every position; the draft is kept for as long as it is the same."""
    num_accepted = torch.zeros_like(draft.lengths)
    next_token = draw(target.at(num_accepted), noise.final[:, 0])
    possible = target.of(draft.tokens) > 0  # False for NaN
    for i in range(draft.width):
        alive = num_accepted == i
        kept = alive & (i < draft.lengths) & possible[:, i] & (next_token == draft.tokens[:, i])
        if not bool(kept.any()):
            break
        num_accepted = num_accepted + kept
        next_token = torch.where(kept, draw(target.at(num_accepted), noise.final[:, i + 1]), next_token)
    return num_accepted, next_token


RULES: dict[Rule, Callable[[TargetLaw, Draft, Noise], tuple[Tensor, Tensor]]] = {
    Rule.TOKEN: token_rule,
    Rule.BLOCK: block_rule,
    Rule.COUPLED: coupled_rule,
}


def count_accepted(p: Tensor, q: Tensor, u: Tensor, lengths: Tensor) -> Tensor:
    """Length of the accepted prefix: drafted tokens before the first with u * q >= p, or that q could not have drawn.

    The comparison is strict, so that a token the target forbids is never kept, and NaN never passes it.
    """
    return kept_prefix((q > 0) & (u * q < p), lengths)  # u < p / q, without dividing by zero


def kept_prefix(kept: Tensor, lengths: Tensor) -> Tensor:
    """How many of the first `lengths` come before one that is not kept: [B, K] bool -> [B] int64."""
    column = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (column < lengths.unsqueeze(-1))).long().cumprod(dim=-1).sum(dim=-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the draft left of the target's law, unnormalised: the positive part of p - q, [B, V] each.

    Where rounding leaves nothing, or the difference is not finite, p itself. Nothing is left where p has nothing,
    whatever q is: see `claimed`.
    """
    return or_else((p - claimed(q)).clamp(min=0.0), p)


def or_else(weights: Tensor, p: Tensor) -> Tensor:
    """Weights [B, V] where a row has any and they are finite, else the target's law `p`."""
    mass = tile_sums(weights).sum(dim=-1, keepdim=True)
    return torch.where((mass > 0) & mass.isfinite(), weights, p)


def claimed(q: Tensor) -> Tensor:
    """A draft's law as far as it can be one: NaN and what is below 0 count as 0.

    Such a token cannot have been accepted, so nothing was taken from it. A negative q would add mass where the target
    has none, and change the text of a greedy row.
    """
    return q.nan_to_num(0.0).clamp(min=0.0)


def block_weights(p: Tensor, q: Tensor) -> Tensor:
    """w_i = min(1, w_{i-1} p_i / q_i) for i = 1 .. K: how much of each prefix the target still wants, [B, K]."""
    ratio = torch.where((q > 0) & (p > 0), p.double() / q.double(), 0.0)
    weight = torch.ones_like(ratio[:, :1])
    weights = []
    for i in range(ratio.shape[1]):
        weight = (weight * ratio[:, i : i + 1]).clamp(max=1.0)
        weights.append(weight)
    return torch.cat(weights, dim=-1) if weights else ratio


def block_chances(weight: Tensor, excess: Tensor, lengths: Tensor) -> Tensor:
    """h_i: S_i / (S_i + 1 - w_i) inside the draft and w_i at its end, [B, K].

    Where both S_i and 1 - w_i vanish, the next token is kept with certainty and the answer is never asked for.
    """
    inside = torch.where(excess > 0, excess / (excess + 1 - weight), 0.0)
    column = torch.arange(1, weight.shape[1] + 1, device=weight.device)
    return torch.where(column == lengths.unsqueeze(-1), weight, inside)


def _excess(target: Law, draft: Draft, weight: Tensor) -> Tensor:
    """S_i = sum over x of max(0, w_i p_{i+1}(x) - q_{i+1}(x)), [B, K]; one position at a time, so never [B, K, V]."""
    excess = torch.zeros_like(weight)
    for i in range(1, draft.width):
        position = torch.full_like(draft.lengths, i)
        left = weight[:, i - 1 : i] * target.at(position) - claimed(draft.law.at(position))
        excess[:, i - 1] = tile_sums(left.clamp(min=0.0)).sum(dim=-1)
    return excess


def _finish(target: TargetLaw, draft: Draft, num_accepted: Tensor, scale: Tensor | None, noise: Noise) -> Tensor:
    """The correction or bonus at each row's own position; `scale` [B, K + 1] weighs p against q (1 if None)."""
    where = num_accepted.unsqueeze(-1)
    u = noise.final.gather(1, where).squeeze(-1)
    rejected = num_accepted < draft.lengths
    if not draft.width or not bool(rejected.any()):
        return target.draw(num_accepted, u)
    p = target.at(num_accepted)
    weights = residual(p if scale is None else p * scale.gather(1, where), draft.law.at(num_accepted))
    return draw(torch.where(rejected.unsqueeze(-1), weights, p), u)
