"""Models inside the wrapper of the library `peft`.

Most adapters (LoRA and its many relatives) are put into the model's own modules, and the wrapper only passes calls on:
the model inside says what the wrapper says. Others act in the wrapper's own forward, which Forerun would leave out.
"""

from __future__ import annotations

import sys
from typing import Any

from forerun.errors import UnsupportedModel

# Kinds whose whole effect is in the modules that they replace. A kind that is not named here may be of any other sort.
INSIDE = frozenset({
    "LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "LN_TUNING", "VERA", "FOURIERFT", "HRA", "VBLORA", "MISS",
    "RANDLORA", "ROAD", "TRAINABLE_TOKENS", "SHIRA", "C3A", "WAVEFT", "OSF", "DELORA", "GRALORA", "HIRA",
})  # fmt: skip


def unwrapped(model: Any) -> Any:
    """The model inside a `peft` wrapper, its adapters in place; any other model as it is."""
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    for config in model.peft_config.values():
        _check(config)
    return model.base_model.model


def _check(config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"an adapter of kind {kind} puts vectors of its own before every prompt, which Forerun does not; use the "
            "generate of peft, or train an adapter of another kind, such as LoRA"
        )
    if kind not in INSIDE:
        raise UnsupportedModel(
            f"an adapter of kind {kind} may act outside of the model's modules, where Forerun would leave it out; give "
            "the model that merge_and_unload() returns, or use the generate of peft"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModel(
            "an activated LoRA begins at certain tokens of each prompt, which only the generate of peft looks for; use "
            "that, or an ordinary LoRA"
        )
