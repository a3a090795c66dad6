"""What a draft is trained to lower: distances between the target's law p and the draft's law q.

A draft may lack some of the target's tokens. p is then given on the draft's tokens together with the mass it puts
elsewhere, where q is 0. Every loss is one number a position; the target's side never receives a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.precision import working


@dataclass(frozen=True, slots=True)
class TeacherLaw:
    """The target's law at N positions, on the V tokens of the draft's vocabulary."""

    log_p: Tensor  # [N, V] log-probabilities, at least float32
    elsewhere: Tensor  # [N] mass of the tokens outside that vocabulary

    @classmethod
    def from_logits(cls, logits: Tensor, log_mass: Tensor) -> TeacherLaw:
        """From the target's logits on the draft's tokens [N, V] and their logsumexp over *all* tokens [N]."""
        log_p = working(logits) - log_mass.unsqueeze(-1)
        return cls(log_p, (1 - log_p.exp().sum(dim=-1)).clamp(min=0))

    @classmethod
    def from_top(cls, ids: Tensor, log_p: Tensor, vocab_size: int, tokens: Tensor | None = None) -> TeacherLaw:
        """From the K likeliest tokens [N, K]; the mass left over is spread evenly, `tokens` [V] are the draft's."""
        log_p = working(log_p)
        rest = (1 - log_p.exp().sum(dim=-1, keepdim=True)).clamp(min=torch.finfo(log_p.dtype).tiny)
        even = rest.log() - torch.tensor(max(vocab_size - ids.shape[-1], 1), dtype=log_p.dtype).log()
        full = even.expand(-1, vocab_size).scatter(-1, ids.long(), log_p)
        return cls.from_logits(full if tokens is None else full[:, tokens], torch.zeros_like(rest[:, 0]))


@dataclass(frozen=True, slots=True)
class DraftEstimate:
    """The draft's answer at N positions, beside the truth."""

    law: TeacherLaw
    logits: Tensor  # [N, V] the draft's
    hidden: Tensor  # [N, H] what the draft's head read
    feature: Tensor | None  # [N, H] what the target's head read there, None where it was not computed


def log_law(logits: Tensor) -> Tensor:
    """log q in float32 at least, whatever the logits came in."""
    return torch.log_softmax(working(logits), dim=-1)


def overlap(law: TeacherLaw, logits: Tensor) -> Tensor:
    """Chance that a token drawn from q is kept: sum of min(p, q), [N]."""
    return torch.minimum(law.log_p.exp(), log_law(logits).exp()).sum(dim=-1)


def total_variation(case: DraftEstimate) -> Tensor:
    """1 - sum min(p, q): the chance that a drafted token is rejected."""
    return 1 - overlap(case.law, case.logits)


def forward_kl(case: DraftEstimate) -> Tensor:
    """KL from p, narrowed to the draft's tokens, to q, weighed by the mass p has there: never negative, never inf."""
    log_p, log_q = case.law.log_p, log_law(case.logits)
    p = log_p.exp()
    held = p.sum(dim=-1)
    return _weighed(p, log_p - log_q) - torch.xlogy(held, held)


def reverse_kl(case: DraftEstimate) -> Tensor:
    """KL from q to p; p is floored at the smallest normal number, so that a token p rules out costs much, not inf."""
    log_q = log_law(case.logits)
    floor = torch.finfo(case.law.log_p.dtype).tiny
    return _weighed(log_q.exp(), log_q - case.law.log_p.clamp(min=torch.tensor(floor).log().item()))


def smooth_l1(case: DraftEstimate) -> Tensor:
    """Huber distance between what the two heads read, mean over the width."""
    if case.feature is None:
        raise InvalidArgument("the loss smooth_l1 compares hidden states, and there are none of the target here")
    if case.feature.shape != case.hidden.shape:
        raise InvalidArgument(
            f"the loss smooth_l1 compares hidden states of one width, and the draft's is {case.hidden.shape[-1]}, the "
            f"target's {case.feature.shape[-1]}; use tv or kl, or a draft as wide as the target"
        )
    distance = F.smooth_l1_loss(working(case.hidden), working(case.feature), reduction="none")
    return distance.mean(dim=-1)


def closed_form(
    terms: Sequence[tuple[float, str]], law: TeacherLaw, p: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Values [N] and gradients [N, V] of a mixture of kl and tv: what autograd gives, in a third of its memory traffic.

    `p` is `law.log_p.exp()`, which many estimates of one position share.
    """
    kl, tv = (sum(weight for weight, term in terms if term == name) for name in ("kl", "tv"))
    q = torch.softmax(logits, dim=-1)
    held = p.sum(dim=-1)
    value, factor = torch.zeros_like(held), kl * held
    if kl:
        entropy = torch.linalg.vecdot(p, law.log_p.clamp(min=torch.finfo(p.dtype).min))
        cross = torch.linalg.vecdot(p, logits) - held * torch.logsumexp(logits, dim=-1)
        value = kl * (entropy - cross - torch.xlogy(held, held))
    lesser = torch.where(q < p, q, 0) if tv else None
    if lesser is not None:
        below = lesser.sum(dim=-1)
        value = value + tv * (1 - torch.minimum(p, q).sum(dim=-1))
        factor = factor + tv * below
    gradient = q.mul_(factor.unsqueeze(-1))
    gradient.sub_(p, alpha=kl)
    return value, gradient if lesser is None else gradient.sub_(lesser, alpha=tv)


CLOSED_FORM = frozenset({"kl", "tv"})


def _weighed(weight: Tensor, value: Tensor) -> Tensor:
    """Sum of weight * value, in which a weight of 0 makes the term 0 whatever the value."""
    return torch.where(weight > 0, weight * value, torch.zeros_like(weight)).sum(dim=-1)


Loss = Callable[[DraftEstimate], Tensor]
LOSSES: dict[str, Loss] = {
    "tv": total_variation,
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "smooth_l1": smooth_l1,
}
RECIPES = {"topk003": "smooth_l1+0.1*kl"}
"""Mixtures with a name: that of TopK-ImpSpecDec, regression on hidden states and a tenth of the divergence."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A weighed sum of losses."""

    terms: tuple[tuple[float, str], ...]

    def __call__(self, case: DraftEstimate) -> Tensor:
        return torch.stack([weight * LOSSES[name](case) for weight, name in self.terms]).sum(dim=0)

    @property
    def has_closed_form(self) -> bool:
        return all(name in CLOSED_FORM for _, name in self.terms)

    @property
    def needs_features(self) -> bool:
        return any(name == "smooth_l1" for _, name in self.terms)

    def __str__(self) -> str:
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for weight, name in self.terms)


def parse_loss(text: str) -> Mixture:
    """`tv`, `kl`, `tv+0.1*kl`, `topk003` ...: names with weights in front, joined by +."""
    terms: list[tuple[float, str]] = []
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:([0-9.]+(?:e-?[0-9]+)?)\*)?([a-z_0-9]+)", part)
        name = match.group(2) if match else None
        if match is None or name not in {*LOSSES, *RECIPES}:
            raise InvalidArgument(
                f"loss {text!r}: {part!r} is no loss; give {', '.join([*LOSSES, *RECIPES])}, or a mixture such as "
                "tv+0.1*kl"
            )
        weight = _weight(match.group(1), text)
        inner = parse_loss(RECIPES[name]).terms if name in RECIPES else ((1.0, name),)
        terms += [(weight * factor, term) for factor, term in inner]
    return Mixture(tuple(terms))


def _weight(text: str | None, whole: str) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise InvalidArgument(f"loss {whole!r}: the weight {text!r} must be a number above 0")
    return weight
