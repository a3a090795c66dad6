"""Which drafter: the one that a folder holds, or the default for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from forerun import drafts
from forerun.drafters.base import Drafter
from forerun.drafters.chain import Chain
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.feature_head import FeatureHead
from forerun.drafters.parallel_heads import ParallelHeads
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.drafters.self_draft import unasked
from forerun.loading.drafter_folder import is_drafter_folder, read_kind
from forerun.models.sharded import is_sharded

MIN_NGRAM = 2  # before a trained drafter, prompt lookup only drafts where a longer match makes it fairly sure


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


def default_drafter(target: PreTrainedModel) -> Drafter:
    """Prompt lookup; behind it the trained drafter that comes with Forerun for this target, or an 8-bit copy of it.

    The copy is for large targets on a CPU where it measures fast enough (`self_draft.unasked`). Speech is the
    exception: a transcript repeats itself too seldom for lookup to be worth its rounds. Both kinds compute with their
    target's weights, which one process does not have of a target that is split over several.
    """
    if is_sharded(target):
        return PromptLookup()
    folder = drafts.for_target(target)
    if folder is None:
        # With or without the copy the same texts are looked up: seeded calls draft by lookup alone, and whether there
        # is a copy depends on the memory that is free.
        self_draft = unasked(target)
        return PromptLookup() if self_draft is None else Chain(PromptLookup(), self_draft)
    trained = from_folder(folder)
    return trained if folder == drafts.WHISPER else behind_lookup(trained)


def behind_lookup(drafter: Drafter) -> Chain:
    """Copies where the text repeats itself, `drafter` elsewhere."""
    return Chain(PromptLookup(min_ngram=MIN_NGRAM), drafter)
