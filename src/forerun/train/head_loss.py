"""The head that draft and target share, and losses read through it without keeping the logits of many positions.

Logits are made chunk by chunk; gradients are kept, logits are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.math.losses import DraftEstimate, Mixture, TeacherLaw, closed_form, overlap


class SharedHead:
    """The target's head and, where the draft's vocabulary is reduced, the rows of it that the draft uses.

    Logits are made in float32 whatever the models run in: bfloat16 cannot tell logits of 20 apart that differ by 0.1.
    """

    def __init__(self, target_head: nn.Linear, tokens: Tensor | None, draft_head: nn.Linear | None = None) -> None:
        self.full = target_head.weight.detach().float()  # [V, H]
        self.tokens = tokens  # [Vd] int64, ascending; None where the draft can say everything
        self.draft_head = draft_head  # where the draft has one and trains it
        self.narrow = self.full if tokens is None else self.full[tokens]  # [Vd, H]

    @property
    def weight(self) -> Tensor:
        """What the draft's hidden states are multiplied with, [Vd, H]."""
        return self.narrow if self.draft_head is None else self.draft_head.weight

    @torch.no_grad()
    def law(self, features: Tensor) -> TeacherLaw:
        """The target's law after positions with these features: [N, H] -> N laws."""
        features = features.float()
        logits = features @ self.full.T
        narrow = logits if self.tokens is None else features @ self.narrow.T
        return TeacherLaw.from_logits(narrow, torch.logsumexp(logits, dim=-1))

    def name(self, drawn: Tensor) -> Tensor:
        """From places in the draft's vocabulary to token ids."""
        return drawn if self.tokens is None else self.tokens[drawn]


@dataclass(frozen=True, slots=True)
class Positions:
    """What the losses of M positions are computed from."""

    hidden: Tensor  # [S, M, H] the draft's estimates
    weights: Tensor  # [S, M], 0 where an estimate means nothing
    features: Tensor | None  # [M, H] the target's
    law: Callable[[slice], TeacherLaw]  # of a run of positions


@dataclass(frozen=True, slots=True)
class LossResult:
    """The loss, and how often drafts would be kept."""

    loss: Tensor  # [] mean over positions and estimates, by weight
    overlap: Tensor  # [S, M] sum of min(p, q), empty where not asked for
    agreement: Tensor  # [S, M] whether the likeliest tokens agree; likewise


def chunked_loss(positions: Positions, weight: Tensor, loss: Mixture, chunk: int, measure: bool = False) -> LossResult:
    """`weight` [Vd, H] is the draft's head. Gradients reach `positions.hidden` and, if it wants one, `weight`."""
    rates: list[tuple[Tensor, Tensor]] = []
    apply: Any = _Chunked.apply
    total: Tensor = apply(positions.hidden, weight, positions, loss, chunk, rates if measure else None)
    empty = positions.weights.new_zeros(0)
    overlaps, agreements = (torch.cat(parts, dim=1) for parts in zip(*rates, strict=True)) if rates else (empty, empty)
    return LossResult(total / positions.weights.sum().clamp(min=1e-9), overlaps, agreements)


class _Chunked(torch.autograd.Function):
    """The sum of all losses. Gradients are computed on the way forward, while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        positions: Positions,
        loss: Mixture,
        chunk: int,
        rates: list[tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        gradients = tuple(torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in (hidden, weight))
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[1], chunk):
            part = slice(start, start + chunk)
            total = total + _one_chunk(positions, weight, loss, part, gradients, rates)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * outer[0] for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def _one_chunk(
    positions: Positions,
    weight: Tensor,
    loss: Mixture,
    part: slice,
    gradients: tuple[Tensor | None, ...],  # of hidden states and weight, added to where wanted
    rates: list[tuple[Tensor, Tensor]] | None,  # overlap and agreement [S, m] of each chunk, added to where wanted
) -> Tensor:
    """All estimates of a run of positions: the target's law is made once for them."""
    law = positions.law(part)
    p = law.log_p.exp() if loss.has_closed_form else None
    feature = None if positions.features is None else positions.features[part]
    of_hidden, of_weight = gradients
    total = torch.zeros((), device=weight.device)
    measured: list[tuple[Tensor, Tensor]] = []
    for s in range(positions.hidden.shape[0]):
        hidden, shares = positions.hidden[s, part].detach(), positions.weights[s, part]
        with torch.autocast(weight.device.type, enabled=False):
            logits = hidden.float() @ weight.detach().float().T
            if p is not None:
                values, of_logits = closed_form(loss.terms, law, p, logits)
                value, of_logits, direct = (values * shares).sum(), of_logits.mul_(shares.unsqueeze(-1)), None
            else:
                value, of_logits, direct = _by_autograd(loss, DraftEstimate(law, logits, hidden, feature), shares)
            if of_hidden is not None:
                through_head = (of_logits @ weight.detach().float()).to(hidden.dtype)
                of_hidden[s, part] = through_head if direct is None else through_head + direct
            if of_weight is not None:
                of_weight += (of_logits.T @ hidden.float()).to(weight.dtype)
        total = total + value
        if rates is not None:
            measured.append(_overlap_and_agreement(law, logits))
    if rates is not None:
        overlaps, agreements = (torch.stack(values) for values in zip(*measured, strict=True))
        rates.append((overlaps, agreements))
    return total


def _by_autograd(loss: Mixture, estimate: DraftEstimate, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, its gradient by the logits, and that by the hidden states where a loss reads them."""
    logits, hidden = (leaf.detach().requires_grad_() for leaf in (estimate.logits, estimate.hidden))
    with torch.enable_grad():
        value = (loss(replace(estimate, logits=logits, hidden=hidden)) * shares).sum()
        of_logits, direct = torch.autograd.grad(value, (logits, hidden), materialize_grads=True)
    return value.detach(), of_logits, direct


def _overlap_and_agreement(law: TeacherLaw, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the draft's likeliest token is the target's; one that the draft cannot say may be the target's."""
    likeliest = law.log_p.max(dim=-1)
    sure = likeliest.values.exp() >= law.elsewhere  # else a token the draft cannot say might be likelier
    return overlap(law, logits), ((logits.argmax(dim=-1) == likeliest.indices) & sure).float()
