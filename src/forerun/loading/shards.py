"""Whether a model can be split over processes, told from its configuration before anything is loaded."""

from __future__ import annotations

from math import gcd
from typing import Any

from forerun.errors import UnsupportedModel

ATTENTION = ("q_proj", "k_proj", "qkv_proj", "query_key_value")  # whose outputs are heads


def check_divides(config: Any, size: int, name: str) -> None:
    """Refuse a model that transformers has no plan for, or whose heads do not divide by the number of processes."""
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if config.is_encoder_decoder or not plan:
        raise UnsupportedModel(
            f"{name!r} cannot be split over {size} processes: transformers has no tensor parallel plan for "
            f"{text.model_type!r}; load it whole"
        )
    if not any(key.rsplit(".", 1)[-1] in ATTENTION and style == "colwise" for key, style in plan.items()):
        return  # every process has all heads
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or shared % size:
        sizes = [str(n) for n in range(1, gcd(heads, shared) + 1) if gcd(heads, shared) % n == 0]
        raise UnsupportedModel(
            f"{name!r} has {heads} heads of attention and {shared} of keys, which do not divide by {size} processes; "
            f"use {' or '.join(sizes)}"
        )
