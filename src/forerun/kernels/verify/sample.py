"""Drawing a draft's tokens in Triton: warping and the draw in one step, and what verification will need of each row.

The passes are those of verification with an empty draft; the reference is `math.sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.truncate.summary import Logits
from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify.acceptance import NO_DRAFT, TOKEN
from forerun.kernels.verify.draft_law import DTYPES, Proposal
from forerun.kernels.verify.verify import Job
from forerun.math.laws import KEPT, PointMass
from forerun.math.sample import Sample
from forerun.types import Draft, Keys, LawParams


def supports(logits: Tensor) -> bool:
    return logits.dtype in DTYPES and logits.stride(-1) == 1 and len(logits) > 0


def sample(logits: Tensor, params: LawParams, uniforms: Tensor, tuning: Tuning = TUNING) -> Sample:
    """One token a row of `logits` [M, V] with `uniforms` [M], for what `supports` allows."""
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
