"""Drafters that come with Forerun, and the targets they were trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMOLLM2 = Path(__file__).parent / "smollm2-135m-instruct"
"""A feature head for SmolLM2-135M-Instruct; recipes/smollm2-draft says how it was made."""

WHISPER = Path(__file__).parent / "whisper-tiny.en"
"""A decoder of one layer for Whisper tiny.en, on its encoder; recipes/whisper-tiny.en-draft says how it was made."""

SHAPES = {("llama", 576, 30, 49152): SMOLLM2, ("whisper", 384, 4, 51864): WHISPER}
"""Kind, width, layers (of the decoder) and vocabulary."""


def for_target(model: Any) -> Path | None:
    """The folder of a drafter made for a model of this shape; None where there is none.

    A relative of the same shape (the base model, a fine-tuned one) gets it too: its text is as exact, a little slower.
    """
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    folder = SHAPES.get((config.model_type, config.hidden_size, layers, config.vocab_size))
    return folder if folder is not None and folder.is_dir() else None
