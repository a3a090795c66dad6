"""The head that draft and target share, and losses read through it without keeping the logits of many positions.

Logits are made chunk by chunk; gradients are kept, logits are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.math.losses import Estimate, Mixture, TeacherLaw, closed_form, log_law


class SharedHead:
    """The target's head and, where the draft's vocabulary is reduced, the rows of it that the draft uses.

    Logits are made in float32 whatever the models run in: bfloat16 cannot tell logits of 20 apart that differ by 0.1.
    """

    def __init__(self, target_head: nn.Linear, tokens: Tensor | None, own: nn.Linear | None = None) -> None:
        self.full = target_head.weight.detach().float()  # [V, H]
        self.tokens = tokens  # [Vd] int64, ascending; None where the draft can say everything
        self.own = own  # the draft's, where it has one and trains it
        self.narrow = self.full if tokens is None else self.full[tokens]  # [Vd, H]

    @property
    def weight(self) -> Tensor:
        """What the draft's hidden states are multiplied with, [Vd, H]."""
        return self.narrow if self.own is None else self.own.weight

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
    """What is needed to judge M positions."""

    hidden: Tensor  # [S, M, H] the draft's estimates
    weights: Tensor  # [S, M], 0 where an estimate means nothing
    features: Tensor | None  # [M, H] the target's
    law: Callable[[slice], TeacherLaw]  # of a run of positions


@dataclass(frozen=True, slots=True)
class Judgement:
    """The loss, and how often drafts would be kept."""

    loss: Tensor  # [] mean over positions and estimates, by weight
    overlap: Tensor  # [S, M] sum of min(p, q), empty where not asked for
    agreement: Tensor  # [S, M] whether the likeliest tokens agree; likewise


def judge(positions: Positions, weight: Tensor, loss: Mixture, chunk: int, measure: bool = False) -> Judgement:
    """`weight` [Vd, H] is the draft's head. Gradients reach `positions.hidden` and, if it wants one, `weight`."""
    found: list[Tensor] = []
    apply: Any = _Chunked.apply
    total: Tensor = apply(positions.hidden, weight, positions, loss, chunk, found if measure else None)
    empty = positions.weights.new_zeros(0)
    overlap, agreement = (torch.cat(found[i::2], dim=1) for i in (0, 1)) if found else (empty, empty)
    return Judgement(total / positions.weights.sum().clamp(min=1e-9), overlap, agreement)


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
        found: list[Tensor] | None,
    ) -> Tensor:
        wanted = [hidden.requires_grad, weight.requires_grad]
        grads = [torch.zeros_like(hidden) if wanted[0] else None, torch.zeros_like(weight) if wanted[1] else None]
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[1], chunk):
            part = slice(start, start + chunk)
            total = total + _one_chunk(positions, weight, loss, part, grads, found)
        ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        ctx.wanted = wanted
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grads = [saved.pop(0) * outer[0] if wanted else None for wanted in ctx.wanted]
        return (*grads, None, None, None, None)


def _one_chunk(
    positions: Positions,
    weight: Tensor,
    loss: Mixture,
    part: slice,
    grads: list[Tensor | None],
    found: list[Tensor] | None,
) -> Tensor:
    """All estimates of a run of positions: the target's law is made once for them."""
    law = positions.law(part)
    p = law.log_p.exp() if loss.has_closed_form else None
    feature = None if positions.features is None else positions.features[part]
    total = torch.zeros((), device=weight.device)
    measured: list[tuple[Tensor, Tensor]] = []
    for s in range(positions.hidden.shape[0]):
        hidden, shares = positions.hidden[s, part].detach(), positions.weights[s, part]
        with torch.autocast(weight.device.type, enabled=False):
            if p is not None:
                value, logits, got = _by_formula(loss, law, p, hidden, weight.detach(), shares, grads)
            else:
                value, logits, got = _by_autograd(loss, law, feature, hidden, weight.detach(), shares, grads)
        if grads[0] is not None:
            grads[0][s, part] = got.pop(0)
        if grads[1] is not None:
            grads[1] += got.pop(0)
        total = total + value
        if found is not None:
            measured.append(_measure(law, logits.detach()))
    if found is not None:
        found += [torch.stack(values) for values in zip(*measured, strict=True)]
    return total


_Found = tuple[Tensor, Tensor, list[Tensor]]  # the sum of the losses, the logits, the gradients that are wanted


def _by_formula(
    loss: Mixture,
    law: TeacherLaw,
    p: Tensor,
    hidden: Tensor,
    weight: Tensor,
    shares: Tensor,
    grads: list[Tensor | None],
) -> _Found:
    logits = hidden.float() @ weight.float().T
    values, gradient = closed_form(loss.terms, law, p, logits)
    gradient.mul_(shares.unsqueeze(-1))
    got = [] if grads[0] is None else [(gradient @ weight.float()).to(hidden.dtype)]
    got += [] if grads[1] is None else [(gradient.T @ hidden.float()).to(weight.dtype)]
    return (values * shares).sum(), logits, got


def _by_autograd(
    loss: Mixture,
    law: TeacherLaw,
    feature: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    shares: Tensor,
    grads: list[Tensor | None],
) -> _Found:
    with torch.enable_grad():
        hidden.requires_grad_(grads[0] is not None)
        weight.requires_grad_(grads[1] is not None)
        logits = hidden.float() @ weight.float().T
        value = (loss(Estimate(law, logits, hidden, feature)) * shares).sum()
        inputs = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
        got = list(torch.autograd.grad(value, inputs)) if inputs else []
    return value.detach(), logits.detach(), got


def _measure(law: TeacherLaw, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Overlap, and whether the draft's likeliest token is the target's; one it cannot say may be the target's."""
    overlap = torch.minimum(law.log_p.exp(), log_law(logits).exp()).sum(dim=-1)
    likeliest = law.log_p.max(dim=-1)
    sure = likeliest.values.exp() >= law.elsewhere  # else a token the draft cannot say might be likelier
    return overlap, ((logits.argmax(dim=-1) == likeliest.indices) & sure).float()
