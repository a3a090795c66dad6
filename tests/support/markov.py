"""Exact laws of whole continuations, by enumeration: the oracle for tests of the complete loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.tiny import check_stock, draft_of, tiny_model

# (logits [N, V] float64, histories [N, T] int64 with the prompt in front) -> probabilities [N, V]
Warp = Callable[[Tensor, Tensor], Tensor]

SOFTEN = 0.6  # keeps most cells of a joint law of three tokens likely enough to count
DRAFT_NOISE = 0.16


@lru_cache
def toy_pair(vocab: int = 5, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft over so few tokens that every continuation can be listed; their laws differ in every context.

    Cached: copy them before you change them.
    """
    target = copy.deepcopy(tiny_model("llama", seed, vocab=vocab))
    target.get_output_embeddings().weight.data.mul_(SOFTEN)
    return target, draft_of(target, DRAFT_NOISE, seed + 1)


def softmax_at(temperature: float = 1.0) -> Warp:
    """Plain sampling at a temperature."""
    return lambda logits, histories: (logits / temperature).softmax(-1)


@torch.no_grad()
def joint_law(model: PreTrainedModel, prompt: Sequence[int], steps: int, warp: Warp | None = None) -> Tensor:
    """Probability of every continuation of `steps` tokens: [V] * steps, float64, from full forward passes."""
    check_stock(model)
    exact = copy.deepcopy(model).double()
    warp = warp or softmax_at()
    histories = torch.tensor([list(prompt)])
    mass = torch.ones(1, dtype=torch.float64)
    for _ in range(steps):
        law = warp(exact(histories, use_cache=False).logits[:, -1], histories)
        mass = (mass[:, None] * law).flatten()
        histories = _extend(histories, law.shape[1])
    return mass.view([model.config.vocab_size] * steps)


def _extend(histories: Tensor, vocab: int) -> Tensor:
    """Every history with every next token, in the order of `flatten`."""
    following = torch.arange(vocab).repeat(len(histories))
    return torch.cat([histories.repeat_interleave(vocab, dim=0), following[:, None]], dim=1)


def count_joint(samples: Iterable[Sequence[int]], vocab: int, steps: int) -> Tensor:
    """How often each continuation occurred, by its first `steps` tokens: [V] * steps, float64."""
    tokens = torch.tensor([list(sample[:steps]) for sample in samples])
    cells = (tokens * vocab ** torch.arange(steps - 1, -1, -1)).sum(1)
    return torch.bincount(cells, minlength=vocab**steps).double().view([vocab] * steps)


def misfit(counts: Tensor, law: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean: below 6 the counts may come from the law.

    Cells expected fewer than five times are merged; a count where the law is zero is infinitely wrong.
    """
    counts, expected = counts.flatten(), law.flatten() * counts.sum()
    if counts[expected == 0].any():
        return float("inf")
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    freedom = max(int(used.sum()) - 1, 1)
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
