"""Which two models are measured, and what they are asked."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from forerun.bench.decode.calls import Prompt
from forerun.bench.synthetic import build_pair, is_synthetic, parse
from forerun.errors import InvalidArgument

LARGE, SMALL = "synthetic:6.7b+0.33b@0.87", "synthetic:tiny+mini@0.87"


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and a draft model."""

    name: str
    target: Any
    draft: Any
    tokenizer: Any  # None where the models speak no language
    wanted_alpha: float | None  # what was dialled in

    @property
    def device(self) -> torch.device:
        device: torch.device = self.target.device
        return device

    def prompts(self, count: int, length: int, seed: int) -> list[Prompt]:
        """Different ones: random ids for models without language, else Forerun's own questions, as long as they are."""
        if self.tokenizer is None:
            numbers, vocabulary = random.Random(seed), self.target.config.vocab_size
            return [tuple(numbers.randrange(1, vocabulary) for _ in range(length)) for _ in range(count)]
        from forerun.bench.prompts import built_in, encode

        questions = built_in().items
        chosen = [questions[(seed + i) % len(questions)] for i in range(count)]
        return [prompt[-length:] for prompt in encode(self.tokenizer, chosen)]


def default_pair(device: torch.device) -> str:
    return LARGE if device.type == "cuda" else SMALL


def check_pair(model: str, draft: str | None) -> None:
    """Cheap mistakes are told before anything large is built."""
    if is_synthetic(model):
        parse(model)
        if draft is not None:
            raise InvalidArgument(f"--draft={draft!r}: {model} is a pair and brings its own draft; leave --draft away")
    elif draft is None:
        raise InvalidArgument(f"--model={model!r} needs a draft model: give --draft, or a pair such as {LARGE}")


def open_pair(model: str, draft: str | None, device: torch.device, dtype: str | None, seed: int) -> ModelPair:
    check_pair(model, draft)
    if is_synthetic(model):
        pair = build_pair(model, device=device, dtype=dtype, seed=seed)
        return ModelPair(model, pair.target, pair.draft, None, parse(model).alpha)
    from forerun.loading import load_model

    assert draft is not None
    target, tokenizer = load_model(model, device=device, dtype=dtype)
    small, _ = load_model(draft, device=device, dtype=dtype)
    return ModelPair(f"{model} + {draft}", target, small, tokenizer, None)
