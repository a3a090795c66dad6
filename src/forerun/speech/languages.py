"""Languages that a Whisper knows: their names, their codes, and which one it heard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


def language_code(name: str, config: Any) -> str:
    """The two letters of a language the model knows."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code: str = TO_LANGUAGE_CODE.get(name.lower(), name.lower())
    known = sorted(_codes(config).values())
    if code not in known:
        raise InvalidArgument(f"language={name!r}: not one of this model's languages, which are {', '.join(known)}")
    return code


def language_name(code: str) -> str:
    """Its English name, such as german."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return str(LANGUAGES.get(code, code))


def spoken(asked: str | None, config: Any) -> str | None:
    """What a recording is in where the model does not find out: as asked for, or the only one it knows."""
    if not getattr(config, "is_multilingual", True):
        return "en"
    return None if asked is None else language_code(asked, config)


@contextmanager
def detections(model: Any) -> Iterator[list[str]]:
    """Codes that the model finds within the block, one a recording; none where it is not asked to find out.

    transformers asks it within `generate` and tells nobody.
    """
    detected: list[str] = []
    detect = model.detect_language

    def listen(*arguments: Any, **keywords: Any) -> Tensor:
        ids: Tensor = detect(*arguments, **keywords)
        codes = _codes(model.generation_config)
        detected.extend(codes[number] for number in ids.tolist())
        return ids

    model.detect_language = listen
    try:
        yield detected
    finally:
        del model.detect_language


def _codes(config: Any) -> dict[int, str]:
    """By the token that stands for each."""
    return {number: token.strip("<|>") for token, number in getattr(config, "lang_to_id", {}).items()}
