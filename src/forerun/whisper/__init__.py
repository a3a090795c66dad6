"""Whisper's own way of decoding, with drafts: its rules for every position, and its windows of thirty seconds."""

from forerun.whisper.hearing import Hearing
from forerun.whisper.rules import Rules
from forerun.whisper.windows import Windows

__all__ = ["Hearing", "Rules", "Windows", "is_whisper"]


def is_whisper(model: object) -> bool:
    """Whether a model is one of transformers' Whispers, whose `generate` is a program of its own."""
    return getattr(getattr(model, "config", None), "model_type", None) == "whisper"
