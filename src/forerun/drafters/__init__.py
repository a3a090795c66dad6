"""Whatever proposes tokens."""

from __future__ import annotations

from forerun.drafters.chain import Chain
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.ngram import NgramTable
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.drafters.random_draft import RandomDraft

__all__ = ["Chain", "DraftModel", "EarlyExit", "NgramTable", "PromptLookup", "RandomDraft"]
