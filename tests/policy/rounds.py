"""Small builders for what a policy is shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.types import BatchView, Draft, RoundOutcome


def view(*requests: int, rooms: tuple[int, ...] | None = None) -> BatchView:
    return BatchView(tuple(range(len(requests))), requests, rooms or (99,) * len(requests))


def outcome(
    requests: tuple[int, ...],
    drafted: tuple[int, ...],
    accepted: tuple[int, ...],
    ended: tuple[bool, ...] | None = None,
    evidence: tuple[int, ...] | None = None,
    draft_seconds: float = 0.0,
    score_seconds: float = 0.05,
) -> RoundOutcome:
    rows = tuple(range(len(requests)))
    scored = sum(drafted) + len(rows)
    done = ended or (False,) * len(rows)
    return RoundOutcome(rows, requests, drafted, accepted, evidence, scored, draft_seconds, score_seconds, 0.0, done)


def as_draft(lengths: Sequence[int], evidence: tuple[int, ...]) -> Draft:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    return Draft(tokens, torch.tensor(lengths), law=NoLaw(), deterministic=True, evidence=evidence)


class NoLaw:
    """Policies never look at the law."""

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a policy looked at the law")

    def at(self, position: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a policy looked at the law")
