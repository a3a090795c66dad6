"""Deliberate faults. Each is a change that a real program has had or could have; the tests must notice every one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.engine import adjust, drafting, engine, host_round
from forerun.math import verify
from forerun.math.laws import LogitLaw, draw
from forerun.math.random import RandomStream, span, uniforms
from forerun.types import Adjuster, Draft, DraftContext, Keys, Law, Rule


def correct_from_target(patch: MonkeyPatch) -> None:
    """After a rejection draw from p itself instead of what the draft left of it."""
    patch.setattr(verify, "residual", lambda p, q: p)


def bonus_from_row_before(patch: MonkeyPatch) -> None:
    """Off by one: after a fully kept draft draw from the law of the last drafted position."""

    def finish(target: Law, draft: Draft, num_accepted: Tensor, scale: Tensor | None, noise: verify.Noise) -> Tensor:
        good = right(target, draft, num_accepted, scale, noise)
        complete = (num_accepted == draft.lengths) & (draft.lengths > 0)
        bonus = draw(target.at((num_accepted - 1).clamp(min=0)), noise.final[:, 0])
        return torch.where(complete, bonus, good)

    right = verify._finish
    patch.setattr(verify, "_finish", finish)


def no_bonus_keeps_draft(patch: MonkeyPatch) -> None:
    """No bonus: the last drafted token is said twice where the target should have drawn one of its own."""

    def finish(target: Law, draft: Draft, num_accepted: Tensor, scale: Tensor | None, noise: verify.Noise) -> Tensor:
        good = right(target, draft, num_accepted, scale, noise)
        if not draft.width:
            return good
        last = draft.tokens.gather(1, (num_accepted - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where((num_accepted == draft.lengths) & (draft.lengths > 0), last, good)

    right = verify._finish
    patch.setattr(verify, "_finish", finish)


def accept_impossible(patch: MonkeyPatch) -> None:
    """`<=` in the place of `<`: a token of probability 0 passes when the uniform is 0."""

    def count(p: Tensor, q: Tensor, u: Tensor, lengths: Tensor) -> Tensor:
        drafted = torch.arange(p.shape[1]) < lengths.unsqueeze(-1)
        return (drafted & (u * q <= p)).long().cumprod(dim=-1).sum(dim=-1)

    patch.setattr(verify, "count_accepted", count)


def one_round(patch: MonkeyPatch) -> None:
    """Keys that forget the round: every round meets the numbers of the first."""
    _change_keys(patch, lambda keys: replace(keys, round=torch.zeros_like(keys.round)))


def one_position(patch: MonkeyPatch) -> None:
    """Keys that forget the position: the coupled rule's noise is the same in every round."""
    _change_keys(patch, lambda keys: replace(keys, position=torch.zeros_like(keys.position)))


def _change_keys(patch: MonkeyPatch, change: Any) -> None:
    right = host_round.keys_of
    patch.setattr(host_round, "keys_of", lambda batch, device: change(right(batch, device)))


def keyed_by_position(patch: MonkeyPatch) -> None:
    """Numbers counted by the place in the text alone: a place met again in a later round finds the same ones."""

    def absolute(keys: Keys, stream: RandomStream, width: int) -> Tensor:
        columns = [uniforms(replace(keys, round=keys.position + i), ((stream, 0),)) for i in range(width)]
        return torch.cat(columns, dim=1) if columns else torch.zeros(len(keys.seed), 0, dtype=torch.float64)

    def noise(keys: Keys, width: int, rule: Rule) -> verify.Noise:
        return verify.Noise(absolute(keys, RandomStream.ACCEPT, width), absolute(keys, RandomStream.FINAL, width + 1))

    patch.setattr(verify, "noise_of", noise)
    patch.setattr(drafting, "draft_uniforms", lambda keys, width, rule: absolute(keys, RandomStream.DRAFT, width))


def shared_noise(patch: MonkeyPatch, stream: RandomStream) -> None:
    """The drafter draws with the numbers the verifier is going to use."""
    patch.setattr(drafting, "draft_uniforms", lambda keys, width, rule: uniforms(keys, span(stream, width)))


def relaxed_penalties(patch: MonkeyPatch) -> None:
    """Penalties of the round's start for all its positions."""

    def frozen(request: Any, output: Sequence[int], *others: Any) -> Adjuster | None:
        right = adjust.adjuster(request, output, *others)
        if right is None:
            return None
        return lambda logits, drafted, first: torch.cat([right(row[None], (), 0) for row in logits])

    patch.setattr(engine, "adjuster", frozen)


def warm_kernel(patch: MonkeyPatch) -> None:
    """On a GPU: the target's law is taken at another temperature than asked for."""

    def warm(target: LogitLaw, *others: Any, **named: Any) -> Tensor:
        logits = target.logits * 0.7
        return right(LogitLaw(logits, target.index, target.params, target.owner), *others, **named)

    right = _on_gpu("verify.verify").verify_packed
    patch.setattr(_on_gpu("verify.verify"), "verify_packed", warm)


def kernel_of_one_round(patch: MonkeyPatch) -> None:
    """On a GPU: every round meets the acceptance and the final numbers of the first."""

    def first(target: LogitLaw, draft: Draft, rule: Any, keys: Keys, *others: Any, **named: Any) -> Tensor:
        same = replace(keys, round=torch.zeros_like(keys.round), position=torch.zeros_like(keys.position))
        return right(target, draft, rule, same, *others, **named)

    right = _on_gpu("verify.verify").verify_packed
    patch.setattr(_on_gpu("verify.verify"), "verify_packed", first)


def forgetful_attention(patch: MonkeyPatch) -> None:
    """On a GPU: queries see two keys and no more."""

    def short(query: Tensor, keys: Tensor, values: Tensor, reach: Any, *others: Any, **named: Any) -> Tensor:
        return right(query, keys, values, replace(reach, window=2), *others, **named)

    right = _on_gpu("attention.attend").attend_ragged
    patch.setattr(_on_gpu("attention.attend"), "attend_ragged", short)


def _on_gpu(name: str) -> Any:
    """A file of kernels: Triton is only imported where it can run."""
    return importlib.import_module(f"forerun.kernels.{name}")


class Misreporting:
    """A drafter that says another law than the one it drew from."""

    def __init__(self, drafter: Drafter, report: Any) -> None:
        self.drafter, self.report = drafter, report

    def propose(self, context: DraftContext) -> Draft:
        draft = self.drafter.propose(context)
        return replace(draft, law=self.report(draft, context))

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.drafter.rewind(rows, lengths)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.drafter.admit(row, prompt)  # type: ignore[attr-defined]

    def release(self, row: int) -> None:
        self.drafter.release(row)  # type: ignore[attr-defined]


class NextRow:
    """A law off by one: position i answers for position i + 1."""

    def __init__(self, law: Law, width: int) -> None:
        self.law, self.width = law, width

    def of(self, tokens: Tensor) -> Tensor:
        rows = [self.at(torch.full((len(tokens),), i)).gather(1, tokens[:, i : i + 1]) for i in range(tokens.shape[1])]
        return torch.cat(rows, dim=1)

    def at(self, position: Tensor) -> Tensor:
        return self.law.at((position + 1).clamp(max=max(self.width - 1, 0)))
