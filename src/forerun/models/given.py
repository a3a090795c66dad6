"""Is what a caller gives as a model one?"""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.arguments import refuse


def check_model(name: str, value: Any) -> None:
    """A loaded language model: a module with a configuration. What it can do is found out later."""
    if isinstance(value, type):
        refuse(name, value, f"is a class; load a model, {value.__name__}.from_pretrained(...)")
    if isinstance(value, nn.Module) and hasattr(value, "config"):
        return
    if isinstance(value, nn.Module):
        refuse(name, value, "has no configuration; give a model of transformers, such as a LlamaForCausalLM")
    refuse(
        name, value,
        "give a loaded model: AutoModelForCausalLM.from_pretrained(NAME), or forerun.loading.load_model(NAME)[0]",
    )  # fmt: skip
