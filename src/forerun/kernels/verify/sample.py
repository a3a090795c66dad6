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
from forerun.kernels.verify.verify import Job
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
    rows, device = logits.shape[0], logits.device
    index = torch.arange(rows, device=device).unsqueeze(-1)
    nothing = torch.zeros(rows, dtype=torch.int64, device=device)
    kept = torch.empty(rows, KEPT, dtype=torch.float32, device=device)
    tokens = nothing.new_empty(rows, 0)
    draft = Draft(tokens, nothing, PointMass(tokens, logits.shape[1]))
    keys = Keys(nothing, nothing, nothing, nothing)
    proposal = Proposal(NO_DRAFT.value, kept=kept)
    packed = Job(Logits(logits, index, params), draft, proposal, TOKEN.value, keys, tuning, uniforms).run()
    return Sample(packed[:, 1], kept[:, KEPT - 1], kept)
