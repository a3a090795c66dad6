"""Whatever proposes tokens."""

from __future__ import annotations

from forerun.drafters.base import Drafter
from forerun.drafters.chain import Chain
from forerun.drafters.choose import default_drafter, from_folder
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.feature_head import FeatureHead
from forerun.drafters.named import named_drafter
from forerun.drafters.ngram import NgramTable
from forerun.drafters.parallel_heads import ParallelHeads
from forerun.drafters.predicted_text import PredictedText, with_predictions
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.drafters.random_draft import RandomDraft
from forerun.drafters.self_draft import SelfDraft
from forerun.drafters.top_k import TopK
from forerun.drafters.tree import Tree, with_trees

__all__ = [
    "Chain",
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "FeatureHead",
    "NgramTable",
    "ParallelHeads",
    "PredictedText",
    "PromptLookup",
    "RandomDraft",
    "SelfDraft",
    "TopK",
    "Tree",
    "default_drafter",
    "from_folder",
    "named_drafter",
    "with_predictions",
    "with_trees",
]
