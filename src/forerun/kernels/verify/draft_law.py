"""A draft's law in the forms that kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.kernels.launching import DTYPES
from forerun.kernels.truncate.summary import Logits
from forerun.kernels.verify.acceptance import LOGITS, MIXED, POINTS, SPARSE
from forerun.math.laws import LogitLaw, MixedLaw, PointMass, ReducedLaw, SparseLaw
from forerun.types import Law


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft's law as the tensors kernels read; what its kind does not have is any tensor at all, never read."""

    kind: int
    logits: Logits | None = None
    kept: Tensor | None = None  # [N, 5] float32, see math.laws.KEPT
    places: Tensor | None = None  # [V] int32
    points: Tensor | None = None  # [B, K] int64
    is_point: Tensor | None = None  # [B] bool
    sparse: SparseLaw | None = None


def why_not_logits(logits: Tensor) -> str | None:
    """What the kernels do not cover of logits [.., V], in words; None where they cover everything."""
    if logits.dtype not in DTYPES:
        return f"logits of {logits.dtype}"
    return None if logits.stride(-1) == 1 else "rows of logits that are not contiguous"


def proposal_of(law: Law) -> Proposal | None:
    """None for laws of a kind that no kernel reads."""
    if isinstance(law, LogitLaw):
        lies_in_rows = law.index.stride(-1) == 1 or law.index.shape[-1] == 1  # one column has any stride
        is_read = lies_in_rows and not why_not_logits(law.logits)
        return Proposal(LOGITS.value, logits_of(law), law.kept) if is_read else None
    if isinstance(law, ReducedLaw):
        inner = proposal_of(law.law)
        good = inner is not None and inner.kind == LOGITS.value and inner.places is None
        return replace(inner, places=law.places) if good and inner is not None else None
    if isinstance(law, PointMass):
        return Proposal(POINTS.value, points=law.tokens.contiguous())
    if isinstance(law, SparseLaw):
        return Proposal(SPARSE.value, sparse=law) if law.probs.dtype == torch.float32 else None
    return _mixed(law) if isinstance(law, MixedLaw) else None


def _mixed(law: MixedLaw) -> Proposal | None:
    """Rows that copy beside rows that draw."""
    parts = [proposal_of(each) for each in law.laws]
    kinds = [None if part is None else part.kind for part in parts]
    if sorted(kinds, key=str) != [LOGITS.value, POINTS.value]:
        return None
    drawn, copied = parts[kinds.index(LOGITS.value)], parts[kinds.index(POINTS.value)]
    assert drawn is not None and copied is not None
    is_point = law.choice == kinds.index(POINTS.value)
    return replace(drawn, kind=MIXED.value, points=copied.points, is_point=is_point)


def logits_of(law: LogitLaw) -> Logits:
    return Logits(law.logits, law.index, law.params)
