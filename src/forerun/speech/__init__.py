"""Speech to text: files, batches, transcripts and subtitles around Whisper with drafts."""

from forerun.speech.audio import Clip, read
from forerun.speech.formats import Format, render
from forerun.speech.settings import SpeechSettings
from forerun.speech.transcribe import Failure, Spent, Transcriber
from forerun.speech.transcript import Segment, Transcript

__all__ = [
    "Clip",
    "Failure",
    "Format",
    "Segment",
    "SpeechSettings",
    "Spent",
    "Transcriber",
    "Transcript",
    "read",
    "render",
]
