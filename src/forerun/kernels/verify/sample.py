"""Drawing a draft's tokens in Triton: warping and the draw in one step, and what verification will need of each row.

The passes are those of verification with an empty draft; the reference is `math.sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.truncate.summary import Logits
from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify.acceptance import NO_DRAFT, TOKEN
from forerun.kernels.verify.draft_law import Proposal, why_not_logits
from forerun.kernels.verify.job import Job
from forerun.math.laws import KEPT, PointMass
from forerun.math.sample import Sample
from forerun.types import Draft, Keys, LawParams


def why_not(logits: Tensor) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything."""
    if not len(logits):
        return "no rows"
    return why_not_logits(logits)


def sample(logits: Tensor, params: LawParams, uniforms: Tensor, tuning: Tuning = TUNING) -> Sample:
    """One token a row of `logits` [M, V] with `uniforms` [M], where `why_not` has no objection."""
    index = torch.arange(logits.shape[0], device=logits.device).unsqueeze(-1)
    kept = torch.empty(logits.shape[0], KEPT, dtype=torch.float32, device=logits.device)
    packed = draw_packed(Logits(logits, index, params), uniforms, kept, tuning)
    return Sample(packed[:, 1], kept[:, KEPT - 1], kept)


def draw_packed(rows: Logits, uniforms: Tensor, kept: Tensor, tuning: Tuning = TUNING) -> Tensor:
    """One token from each of M rows, one position each, with `uniforms` [M]; `kept` [M, 5] is filled.

    [M, 4] int64: 0, the token, whether the row is finite, log-probability of the token (the bits of float64).
    """
    nothing = torch.zeros(len(uniforms), dtype=torch.int64, device=uniforms.device)
    tokens = nothing.new_empty(len(uniforms), 0)
    draft = Draft(tokens, nothing, PointMass(tokens, rows.vocab))
    keys = Keys(nothing, nothing, nothing, nothing)
    proposal = Proposal(NO_DRAFT.value, kept=kept)
    return Job(rows, draft, proposal, TOKEN.value, keys, tuning, uniforms).run()
