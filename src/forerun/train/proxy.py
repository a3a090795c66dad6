"""A cheap look at a draft while it is trained: expected acceptance along held-out text, without decoding anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.train.batches import Batch
from forerun.train.objective import Objective

DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class ProxyResult:
    """What drafts of `DRAFT_LENGTH` tokens would reach if the text went the way it is stored."""

    loss: float
    acceptance: list[float]  # by place in the draft: mean of sum min(p, q), sampling at temperature 1
    agreement: list[float]  # by place: how often the likeliest tokens agree, greedy
    tokens_per_round: float  # at temperature 1
    tokens_per_round_greedy: float


@torch.no_grad()
def measure(objective: Objective, batches: Iterable[Batch]) -> ProxyResult:
    """Over some batches, none of which is rolled out."""
    losses, sampled, greedy = [], [], []
    for batch in batches:
        result = objective(batch.to(objective.device), seed=0, measure=True)
        losses.append(result.loss)
        sampled.append(chains(result.overlap, batch, objective))
        greedy.append(chains(result.agreement, batch, objective))
    kept, agreed = torch.cat(sampled), torch.cat(greedy)
    return ProxyResult(
        loss=float(torch.stack(losses).mean()),
        acceptance=_means(kept),
        agreement=_means(agreed),
        tokens_per_round=expected_tokens(kept),
        tokens_per_round_greedy=expected_tokens(agreed),
    )


def chains(rates: Tensor, batch: Batch, objective: Objective) -> Tensor:
    """[S, M] rates of single estimates -> [N, K]: the rates that each draft of K tokens would meet in turn."""
    student = objective.initial.student
    rows, width = batch.tokens.shape
    rates = rates.cpu()
    dense = torch.full((rates.shape[0], rows * width), torch.nan)
    dense[:, batch.keep.cpu()] = rates
    dense = dense.view(rates.shape[0], rows, width)
    by_place = []
    length = DRAFT_LENGTH if not student.reads_features else min(DRAFT_LENGTH, student.depth)
    for place in range(length):
        s = min(place, student.depth - 1)  # a causal draft makes every token the same way
        by_place.append(dense[s, :, place : width - length + 1 + place].flatten())
    drafts = torch.stack(by_place, dim=1)
    started = torch.arange(width - length + 1).repeat(rows) >= student.first(1)
    return drafts[started & ~drafts.isnan().any(dim=1)]


def expected_tokens(rates: Tensor) -> float:
    """1 + the mean number of tokens kept, a draft ending at its first rejection: [N, K] -> tokens per round."""
    return 1 + float(rates.cumprod(dim=1).sum(dim=1).mean()) if len(rates) else 1.0


def _means(rates: Tensor) -> list[float]:
    return [round(value, 5) for value in rates.mean(dim=0).tolist()] if len(rates) else []
