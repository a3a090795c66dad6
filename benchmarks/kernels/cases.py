"""What is timed: sizes, dtypes and rules, and logits like those of language models for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Keys, LawParams, Rule

SIGMOID = Sigmoid(-1e3, 1e3)
RULES: dict[str, Any] = {"token": Rule.TOKEN, "block": Rule.BLOCK, "sigmoid": SIGMOID}
STEEPNESS = 1.5  # p falls with rank^-1.5: the likeliest token has 0.4, the nucleus of 0.9 some 60 tokens
NOISE = 0.7  # of the draft's logits around the target's


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    vocab: int
    batch: int
    length: int
    dtype: str = "float32"
    rule: str = "token"
    top_k: int = 0
    top_p: float = 1.0
    kept: bool = True  # whether the drafter kept its rows' summaries
    flat: bool = False  # normal logits, a nucleus of tens of thousands: the worst case of top-p

    @property
    def name(self) -> str:
        cuts = [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        rest = [] if self.kept else ["q summaries not kept"]
        return ", ".join([self.rule, self.dtype, *cuts, *(["flat"] if self.flat else []), *rest])

    @property
    def size(self) -> str:
        return f"{self.vocab} x {self.batch}, {self.length} drafted"

    @property
    def must_read(self) -> int:
        """Bytes of logits that the rule needs, every row that it needs counted once."""
        rows = {
            "token": self.length + 1 + 2,  # all of p; after the refusal p again, and q
            "block": 2 * (self.length + 1) + self.length,  # what is left at every position needs the masses first
            "sigmoid": 2,
        }[self.rule]
        rows += 0 if self.kept or self.rule == "sigmoid" else self.length
        return int(self.batch * self.vocab * rows * getattr(torch, self.dtype).itemsize)


SIZES = (
    (32000, 1, 5), (32000, 1, 10), (32000, 8, 7), (32000, 32, 7),
    (128256, 1, 5), (128256, 8, 7), (128256, 32, 7),
    (256000, 1, 5), (256000, 1, 10), (256000, 8, 7), (256000, 32, 7),
)  # fmt: skip
CASES = (
    *(Case(*size) for size in SIZES),
    Case(32000, 1, 5, top_k=50, top_p=0.95),
    Case(32000, 1, 5, rule="block"),
    Case(32000, 1, 5, rule="sigmoid"),
    Case(128256, 8, 7, top_p=0.9),
    Case(128256, 8, 7, top_k=50),
    Case(128256, 8, 7, top_p=0.9, flat=True),
    Case(256000, 32, 7, kept=False),
    Case(256000, 32, 7, dtype="bfloat16"),
    Case(256000, 32, 7, dtype="bfloat16", kept=False),
    Case(256000, 32, 7, rule="block"),
    Case(256000, 32, 7, rule="sigmoid"),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a rule is given."""

    target: LogitLaw
    draft: Draft
    keys: Keys
    logits: Tensor  # [B, K + 1, V]
    drafted: Tensor  # [B, K, V]


def inputs(case: Case, device: torch.device) -> Inputs:
    """The last drafted token is one the target would not say, so that every row ends with a refusal and reads q."""
    from forerun import ops

    generator = torch.Generator(device).manual_seed(case.vocab + 1000 * case.batch + case.length)
    shape, dtype = (case.batch, case.length + 1, case.vocab), getattr(torch, case.dtype)
    logits = _logits(case, shape, generator).to(dtype)
    noise = torch.randn(shape, generator=generator, device=device)[:, :-1]
    drafted = (logits[:, :-1].float() + NOISE * noise).to(dtype)
    del noise
    row_params = SamplingParams(temperature=1.0, top_k=case.top_k, top_p=case.top_p)
    params = LawParams.stack([row_params] * case.batch, device)
    u = torch.rand(case.batch, case.length, generator=generator, device=device, dtype=torch.float64)
    drawn = [ops.sample(drafted[:, i], params, u[:, i]) for i in range(case.length)]
    tokens = torch.stack([each.tokens for each in drawn], dim=1)
    logits[:, case.length - 1].scatter_(1, tokens[:, -1:], -40.0)
    law = LogitLaw.dense(drafted, params)
    kept = [each.kept for each in drawn if each.kept is not None]
    if case.kept and len(kept) == len(drawn):
        law.kept = torch.stack(kept, dim=1).flatten(0, 1)
    lengths = torch.full((case.batch,), case.length, device=device)
    rows = torch.arange(case.batch, device=device)
    keys = Keys(torch.full_like(rows, 1), rows, torch.zeros_like(rows), torch.zeros_like(rows))
    return Inputs(LogitLaw.dense(logits, params), Draft(tokens, lengths, law), keys, logits, drafted)


def _logits(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if case.flat:
        return torch.randn(shape, generator=generator, device=generator.device)
    x = torch.rand(shape, generator=generator, device=generator.device)
    return x.mul_(case.vocab).add_(1).log_().mul_(-STEEPNESS)
