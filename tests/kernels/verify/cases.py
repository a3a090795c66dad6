"""Drafts and targets for the tests of the verification kernels, and the comparison with the reference."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.config import SamplingParams
from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify import verify as kernel
from forerun.math import verify as reference
from forerun.math.laws import LogitLaw
from forerun.types import Draft, Keys, LawParams, Rule, Verdict
from support.triton_cpu import DEVICE, INTERPRETED

FEW = INTERPRETED or "FORERUN_FEW_ROWS" in os.environ  # a row takes an interpreter or a sanitizer long
ROWS = 4 if FEW else 256
SAMPLED = SamplingParams(temperature=1.0)
# Interpreted, programs run one after the other, and every one of them judges the draft again: few take all tiles.
HERE = replace(TUNING, sum_programs=ROWS) if INTERPRETED else TUNING


@dataclass(frozen=True)
class Round:
    """All that verification is given."""

    target: LogitLaw
    draft: Draft
    keys: Keys
    params: LawParams

    def judged(self, rule: Any = Rule.TOKEN, tuning: Tuning = HERE) -> Verdict:
        assert kernel.why_not(self.target, self.draft, rule, self.params.all_greedy) is None
        return kernel.verify(self.target, self.draft, rule, self.keys, self.params.all_greedy, tuning)

    def expected(self, rule: Any = Rule.TOKEN) -> Verdict:
        return reference.verify(self.target, self.draft, rule, self.keys, self.params.all_greedy)


def keys(rows: int, generator: torch.Generator) -> Keys:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    rounds = torch.randint(0, 10**6, (rows,), generator=generator)
    return Keys(*(x.to(DEVICE) for x in (seeds, torch.arange(rows), rounds, torch.zeros(rows, dtype=torch.int64))))


def params_of(some: list[SamplingParams], rows: int) -> LawParams:
    return LawParams.stack([some[b % len(some)] for b in range(rows)], DEVICE)


def make(
    vocab: int,
    width: int = 3,
    some: list[SamplingParams] | None = None,
    rows: int = ROWS,
    scale: float = 2.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    round_to: float | None = None,
    head: float = 0.0,
) -> Round:
    """A ragged round whose draft was drawn from its own law; logits are made on the CPU, the same everywhere.

    `head` is added to token 17 of every row: before anything is drawn, because laws remember their normalisers.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, width + 1, vocab, generator=generator)
    drafted = logits[:, :width] + 0.5 * scale * torch.randn(rows, width, vocab, generator=generator)
    for x in (logits, drafted) if head else ():
        x[..., 17] += head
    if round_to is not None:
        logits, drafted = (round_to * (x / round_to).round() for x in (logits, drafted))
    logits, drafted = (x.to(DEVICE, dtype) for x in (logits, drafted))
    params = params_of(some or [SAMPLED], rows)
    lengths = (torch.arange(rows) + 1).remainder(width + 1).flip(0).to(DEVICE)
    law = LogitLaw.dense(drafted, params)
    return Round(LogitLaw.dense(logits, params), drawn(law, lengths, width, generator), keys(rows, generator), params)


def drawn(law: Any, lengths: torch.Tensor, width: int, generator: torch.Generator) -> Draft:
    from forerun.math.laws import draw

    u = torch.rand(len(lengths), max(width, 1), generator=generator, dtype=torch.float64).to(DEVICE)
    columns = [draw(law.at(torch.full_like(lengths, i)), u[:, i]) for i in range(width)]
    tokens = torch.stack(columns, dim=1) if columns else lengths.new_empty(len(lengths), 0)
    return Draft(tokens, lengths, law)


def assert_same(got: Verdict, want: Verdict, but: torch.Tensor | None = None) -> None:
    """The same tokens. On a GPU the last bit of an exponential is another library's, so one draw in 500 may differ."""
    assert got.finite.tolist() == want.finite.tolist()
    good = want.finite if but is None else want.finite & ~but
    same = (got.num_accepted == want.num_accepted) & (got.next_token == want.next_token)
    different = int((good & ~same).sum())
    assert different <= (0 if INTERPRETED else -(-len(same) // 500)), f"{different} of {len(same)} rows differ"
