"""After a verdict: what the next round of the same rows starts from, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.math.precision import working
from forerun.math.row_options import count_emitted
from forerun.types import Verdict

HEAD = 4  # numbers of a result before the drafted tokens: kept, next token, whether finite, drafted


@dataclass(frozen=True, slots=True)
class DeviceRowState:
    """Where rows of a device round stand. All of it is changed in place."""

    past: Tensor  # [R] int64, keys that stand
    round: Tensor  # [R] int64, the row's own
    position: Tensor  # [R] int64, new tokens so far
    active: Tensor  # [R] int64, 0 for a place without a row, which stays where it is
    block: Tensor  # [R, 1 + W] int64: the token before the last one, the last one, the draft behind it
    result: Tensor  # [R, HEAD + W - 1] int64, for the host: HEAD numbers and the drafted tokens


def advance(
    state: DeviceRowState, drafted: Tensor, verdict: Verdict, vocab_size: int, counts: Tensor | None = None
) -> None:
    """Write down what became of `drafted` [R] tokens a row, and move every row to the end of what it gained.

    What it gained is counted in `counts` (`math.row_options.RowOptions`), where there are any.

    A row whose logits were no numbers has no next token worth the name; whatever stands there is made one that can be
    looked up, because the next round may be under way before the host hears of it.
    """
    kept = verdict.num_accepted
    following = verdict.next_token.clamp(0, vocab_size - 1)
    block, result = state.block, state.result
    result[:, 0], result[:, 1], result[:, 2], result[:, 3] = kept, following, verdict.finite, drafted
    result[:, HEAD:] = block[:, 2:]
    block[:, 0] = block.gather(1, (kept + 1).unsqueeze(-1)).squeeze(-1)
    block[:, 1] = following
    gained = (kept + 1) * state.active
    if counts is not None:
        count_emitted(counts, block[:, 2:], kept * state.active)
        count_emitted(counts, following.unsqueeze(-1), state.active)
    state.past.add_(gained)
    state.position.add_(gained)
    state.round.add_(state.active)


def last_tokens(recent: Tensor, block: Tensor, verdict: Verdict, vocab_size: int) -> Tensor:
    """[R, W] the last tokens of each row once it has gained what the verdict leaves, from those before it, `recent`.

    `block` is as in `DeviceRowState`, before `advance`.
    """
    kept = verdict.num_accepted.unsqueeze(-1)
    gained = pad(block[:, 2:], (0, 1)).scatter(1, kept, verdict.next_token.unsqueeze(-1).clamp(0, vocab_size - 1))
    column = torch.arange(1, 1 + recent.shape[1], device=recent.device)
    return torch.cat([recent, gained], dim=1).gather(1, kept + column)


def emitted_logprobs(logits: Tensor, block: Tensor, verdict: Verdict, alternatives: int = 0) -> Tensor:
    """[R, K + 1, 1 + 2 n] float64: how likely the model itself, as it came, finds what is emitted; past that anything.

    Behind it the ids of the n most likely tokens at that position, best first, and how likely they are.
    `logits` [R, K + 1, V] follow the last token and each drafted one, `block` is as in `DeviceRowState`.
    """
    number = logits.shape[1] - 1
    kept, last = verdict.num_accepted.unsqueeze(-1), verdict.next_token.unsqueeze(-1).clamp(0, logits.shape[-1] - 1)
    tokens = torch.cat([block[:, 2 : 2 + number], last], dim=1).scatter(1, kept, last)
    weights = working(logits)
    log_mass = weights.logsumexp(-1, keepdim=True)
    of_tokens = weights.gather(-1, tokens.unsqueeze(-1)) - log_mass
    if not alternatives:
        return of_tokens.double()
    best = weights.topk(alternatives, dim=-1)
    return torch.cat([of_tokens.double(), best.indices.double(), (best.values - log_mass).double()], dim=-1)


def draft_lengths(asked: Tensor, budget: Tensor, position: Tensor, most: int) -> Tensor:
    """[R] what was asked for, at most `most`, where the row's budget has room for it and the token behind it."""
    return torch.minimum(asked.clamp(max=most), budget - position - 1).clamp(min=0)


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Where the new tokens of `S` passes go, one after the other: R rows with T tokens each, N = R * T."""

    positions: Tensor  # [S, N] int64
    addresses: Tensor  # [S, N] int64
    ends: Tensor  # [S, R] int32, keys of each row once the pass has written its own
    slots: Tensor  # [R] int32


def lay_out(
    slots: Tensor, past: Tensor, count: int, number: int, capacity: int, limit: int, table: Tensor | None = None
) -> PassLayout:
    """`number` passes of `count` tokens a row behind `past` [R] keys, each pass one token further on.

    A slot is `capacity` keys in one piece, or, with a `table` [slots, most blocks], as many blocks of `capacity` keys.
    No position reaches `limit`: what would lie there is nobody's, but must be looked up all the same. What would lie
    before a row's beginning goes to its last place, where a key of its own is written before anybody looks; with a
    table to block 0, which is nobody's, as does what would lie past the table.
    """
    first = past + torch.arange(number, device=past.device).unsqueeze(-1)
    places = first.unsqueeze(-1) + torch.arange(count, device=past.device)
    if table is None:
        addresses = torch.where(places < 0, capacity - 1, places) + (slots * capacity).unsqueeze(-1)
    else:
        index, is_there = places // capacity, (places >= 0) & (places < table.shape[1] * capacity)
        blocks = table.long()[slots.unsqueeze(-1), index.clamp(0, table.shape[1] - 1)]
        addresses = torch.where(is_there, blocks * capacity, 0) + places % capacity
    return PassLayout(places.clamp(0, limit - 1).flatten(1), addresses.flatten(1), (first + count).int(), slots.int())
