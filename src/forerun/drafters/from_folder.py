"""A drafter from whatever a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.drafters.draft_model import DraftModel
from forerun.drafters.feature_head import FeatureHead
from forerun.drafters.parallel_heads import ParallelHeads
from forerun.loading.drafter_folder import is_drafter_folder, read_kind
from forerun.types import Drafter


def from_folder(folder: str | Path, *, stop_below: float | None = None, **loading: Any) -> Drafter:
    """The drafter that training wrote to `folder`, or a draft model from an ordinary model folder.

    Trained drafters come to where their target is, in its type; `loading` (device, dtype, offline) is for the others.
    """
    kind = read_kind(folder) if is_drafter_folder(folder) else "causal"
    if kind == "feature":
        return FeatureHead.load(folder, stop_below=stop_below)
    if kind == "parallel":
        return ParallelHeads.load(folder, stop_below=stop_below)
    return DraftModel.load(folder, stop_below=stop_below, **loading)
