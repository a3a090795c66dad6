"""Drafters that come with Forerun, and the targets they were trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMOLLM2 = Path(__file__).parent / "smollm2-135m-instruct"
"""A feature head for SmolLM2-135M-Instruct; recipes/smollm2-draft says how it was made."""


def for_target(model: Any) -> Path | None:
    """The folder of a drafter made for a model of this shape; None where there is none.

    A relative of the same shape (the base model, a fine-tuned one) gets it too: its text is as exact, a little slower.
    """
    config = model.config.get_text_config(decoder=True)
    shape = (config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size)
    return SMOLLM2 if shape == ("llama", 576, 30, 49152) else None
