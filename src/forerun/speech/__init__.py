"""Speech to text: Whisper's windows and rules with drafts, recordings in, transcripts and subtitles out."""

from forerun.speech.audio import Clip, read
from forerun.speech.encoder_monitor import EncoderMonitor
from forerun.speech.formats import Format, render
from forerun.speech.rules import Rules
from forerun.speech.settings import SpeechSettings
from forerun.speech.transcribe import Failure, Spent, Transcriber
from forerun.speech.transcript import Segment, Transcript
from forerun.speech.windows import Windows, is_whisper

__all__ = [
    "Clip",
    "EncoderMonitor",
    "Failure",
    "Format",
    "Rules",
    "Segment",
    "SpeechSettings",
    "Spent",
    "Transcriber",
    "Transcript",
    "Windows",
    "is_whisper",
    "read",
    "render",
]
