"""Forerun: language models answer faster without changing what they say."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.version import __version__

if TYPE_CHECKING:
    from forerun import lossy
    from forerun.checks.suite import check
    from forerun.config import SamplingParams
    from forerun.decoder import GenerateResult, SpeculativeDecoder, Stream
    from forerun.drafters import (
        Chain,
        DraftModel,
        EarlyExit,
        FeatureHead,
        NgramTable,
        ParallelHeads,
        PredictedText,
        PromptLookup,
        RandomDraft,
        SelfDraft,
        TopK,
        Tree,
    )
    from forerun.drafters.base import Drafter
    from forerun.engine import AsyncEngine, Engine, FinishReason, Progress, Request, RequestStream, Stats
    from forerun.errors import EngineClosed, ForerunError, ForerunWarning
    from forerun.loading.load import load
    from forerun.math.laws import PointMass, SparseLaw
    from forerun.models.scorer import Scorer
    from forerun.models.seq2seq import Seq2SeqScorer
    from forerun.policy import BassHeuristic, Constant, CostModel, HfHeuristic
    from forerun.policy.base import Policy
    from forerun.types import Draft, DraftContext, Rule, Source

# Where each public name lives: torch and transformers are only imported when one is used.
_HOMES = {
    "forerun.checks.suite": ("check",),
    "forerun.config": ("SamplingParams",),
    "forerun.decoder": ("GenerateResult", "SpeculativeDecoder", "Stream"),
    "forerun.drafters": (
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
    ),
    "forerun.engine": ("AsyncEngine", "Engine", "FinishReason", "Progress", "Request", "RequestStream", "Stats"),
    "forerun.errors": ("EngineClosed", "ForerunError", "ForerunWarning"),
    "forerun.loading": ("load",),
    "forerun.math.laws": ("PointMass", "SparseLaw"),
    "forerun.models.scorer": ("Scorer",),
    "forerun.models.seq2seq": ("Seq2SeqScorer",),
    "forerun.policy": ("BassHeuristic", "Constant", "CostModel", "HfHeuristic"),
    "forerun.policy.base": ("Policy",),
    "forerun.types": ("Draft", "DraftContext", "Rule", "Source"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncEngine",
    "BassHeuristic",
    "Chain",
    "Constant",
    "CostModel",
    "Draft",
    "DraftContext",
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "Engine",
    "EngineClosed",
    "FeatureHead",
    "FinishReason",
    "ForerunError",
    "ForerunWarning",
    "GenerateResult",
    "HfHeuristic",
    "NgramTable",
    "ParallelHeads",
    "PointMass",
    "Policy",
    "Progress",
    "PredictedText",
    "PromptLookup",
    "RandomDraft",
    "Request",
    "RequestStream",
    "Rule",
    "SamplingParams",
    "Scorer",
    "SelfDraft",
    "Seq2SeqScorer",
    "Source",
    "SparseLaw",
    "SpeculativeDecoder",
    "Stats",
    "Stream",
    "TopK",
    "Tree",
    "__version__",
    "check",
    "load",
    "lossy",
]


def __getattr__(name: str) -> Any:
    if name == "lossy":
        return import_module("forerun.lossy")
    if name not in _HOME:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
