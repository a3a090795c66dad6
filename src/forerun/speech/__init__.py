"""Speech to text: Whisper's windows and rules with drafts, recordings in, transcripts and subtitles out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.speech.audio import Clip, read
    from forerun.speech.encoder_monitor import EncoderMonitor
    from forerun.speech.formats import Format, render
    from forerun.speech.rules import Rules
    from forerun.speech.settings import SpeechSettings
    from forerun.speech.transcribe import Failure, Transcriber, TranscribeSeconds
    from forerun.speech.transcript import Segment, Transcript
    from forerun.speech.windows import Windows, is_whisper

# Where each name lives: the command line reads the settings for `--help`, which does not wait for torch.
_HOMES = {
    "audio": ("Clip", "read"),
    "encoder_monitor": ("EncoderMonitor",),
    "formats": ("Format", "render"),
    "rules": ("Rules",),
    "settings": ("SpeechSettings",),
    "transcribe": ("Failure", "TranscribeSeconds", "Transcriber"),
    "transcript": ("Segment", "Transcript"),
    "windows": ("Windows", "is_whisper"),
}

__all__ = [
    "Clip",
    "EncoderMonitor",
    "Failure",
    "Format",
    "Rules",
    "Segment",
    "SpeechSettings",
    "TranscribeSeconds",
    "Transcriber",
    "Transcript",
    "Windows",
    "is_whisper",
    "read",
    "render",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
