"""Settings: what a caller may ask of the sampler, and the one place that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forerun.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row is sampled. The order is fixed: bias, penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int | None = None
    """Keep the k most likely tokens; tokens tied with the last one kept stay."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass; tokens tied with the last one kept stay."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens in prompt or output by this, multiply negative ones (as in transformers)."""
    presence_penalty: float = 0.0
    """Subtract from tokens that are in the output (OpenAI's rule)."""
    frequency_penalty: float = 0.0
    """Subtract this times the token's count in the output (OpenAI's rule)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Add to the logits of these tokens; -inf forbids one."""

    def __post_init__(self) -> None:
        _check(self.temperature >= 0 and math.isfinite(self.temperature), "temperature", self.temperature,
               "must be finite and >= 0; use 0 for greedy decoding")  # fmt: skip
        _check(self.top_k is None or self.top_k >= 0, "top_k", self.top_k, "must be >= 1, or 0 or None for no limit")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 keeps everything")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]; 0 keeps everything")
        _check(self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty), "repetition_penalty",
               self.repetition_penalty, "must be finite and > 0; 1 changes nothing")  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            _check(math.isfinite(getattr(self, name)), name, getattr(self, name), "must be finite; 0 changes nothing")
        for token, bias in self.logit_bias.items():
            _check(token >= 0 and bias < math.inf, "logit_bias", {token: bias}, "needs token ids >= 0 and biases < inf")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on more than the model: the cheap path skips adjustment altogether."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


def _check(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise InvalidArgument(f"{name}={value!r}: {name} {rule}")


class Kernels(StrEnum):
    """Whether compiled kernels may stand in for torch's operations."""

    AUTO = "auto"  # where they are installed, fit, and measure faster on this machine
    ON = "on"  # wherever they are installed and fit
    OFF = "off"


def kernels(asked: Kernels | None = None) -> Kernels:
    """What was asked for; where nothing was, what $FORERUN_KERNELS says, and `auto` without it."""
    if asked is not None:
        return asked
    found = os.environ.get("FORERUN_KERNELS", Kernels.AUTO)
    try:
        return Kernels(found)
    except ValueError:
        raise InvalidArgument(f"FORERUN_KERNELS={found!r}: choose one of {', '.join(Kernels)}") from None


def cache_folder() -> Path:
    """Where converted models and measured costs are kept: $FORERUN_CACHE, or a folder of the user's cache."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forerun"


def is_offline() -> bool:
    """Whether the user has told Hugging Face libraries to stay off the network."""
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def data_folder() -> Path | None:
    """Where prompts for measurements are kept: $FORERUN_DATA, or the folder the tests use, $FORERUN_TEST_DATA."""
    chosen = os.environ.get("FORERUN_DATA") or os.environ.get("FORERUN_TEST_DATA")
    return Path(chosen) if chosen else None
