"""Bias and penalties: the part of the law that depends on the row's own history, advanced along the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.math.precision import working
from forerun.math.transfer import float64, int64


def adjust(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int] | Counter[int],
    drafted: Sequence[int],
    params: SamplingParams,
    forbid: Sequence[int] = (),
    min_new_tokens: int = 0,
) -> Tensor:
    """Logits [n, V] of consecutive positions of one row -> a new tensor: bias, repetition, presence and frequency.

    Position i has seen `output` and the first i of `drafted` (at least n - 1 tokens). The ids in `forbid` are cut at
    positions before which fewer than `min_new_tokens` were emitted. Seen ids the logits do not have are passed over.
    Of the output no order is asked: it may be given as how often each token is in it, by who has counted already.
    """
    assert len(drafted) >= logits.shape[0] - 1, "every position after the first follows a drafted token"
    adjusted = working(logits).clone()
    drafted = drafted[: max(logits.shape[0] - 1, 0)]
    if params.logit_bias:
        _add_bias(adjusted, params.logit_bias)
    if params.repetition_penalty != 1:  # which asks whether a token is there, and not how often
        seen = _counts(adjusted, (*prompt, *output), drafted)
        _penalise_repetition(adjusted, *seen, params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = _counts(adjusted, output, drafted)
        adjusted[:, ids] -= params.presence_penalty * counts.clamp(max=1) + params.frequency_penalty * counts
    early = max(min_new_tokens - num_emitted(output), 0)
    if early and forbid:
        adjusted[:early, _known(forbid, adjusted)] = -torch.inf
    return adjusted


def num_emitted(output: Sequence[int] | Counter[int]) -> int:
    """Tokens of an output, or of its counts."""
    return output.total() if isinstance(output, Counter) else len(output)


def check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Refuse a bias on ids the logits do not have."""
    if bias and max(bias) >= vocab_size:
        raise InvalidArgument(
            f"logit_bias={{{max(bias)}: ...}}: the vocabulary ends at {vocab_size - 1}; remove that id"
        )


def _add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    check_bias(bias, logits.shape[-1])
    ids, values = int64(bias), float64(bias.values())  # a caller may forbid half of a large vocabulary
    logits[:, ids.to(logits.device)] += values.to(logits.device, logits.dtype)


def _penalise_repetition(logits: Tensor, ids: Tensor, counts: Tensor, penalty: float) -> None:
    old = logits[:, ids]
    logits[:, ids] = torch.where(counts > 0, torch.where(old < 0, old * penalty, old / penalty), old)


def _counts(logits: Tensor, history: Iterable[int], drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The ids met anywhere, [U], and how often each was met before every position, [n, U]."""
    before = Counter(history)
    ids = _known((*before, *drafted), logits)
    counts = torch.tensor([before[i] for i in ids], dtype=logits.dtype).repeat(logits.shape[0], 1)
    column = {token: i for i, token in enumerate(ids)}
    for i, token in enumerate(drafted):
        if token in column:
            counts[i + 1 :, column[token]] += 1
    return torch.tensor(ids, dtype=torch.int64, device=logits.device), counts.to(logits.device)


def _known(ids: Iterable[int], logits: Tensor) -> list[int]:
    """Each id once, those the logits have."""
    return [token for token in dict.fromkeys(ids) if 0 <= token < logits.shape[-1]]
