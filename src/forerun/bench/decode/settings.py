"""How much is measured: on a GPU within three minutes, on a CPU within one, and `quick` in a quarter of that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.bench.decode.pair import check_pair, default_pair
from forerun.bench.settings import DecodeOptions
from forerun.errors import InvalidArgument
from forerun.loading.load import choose_device

LEADING = (1, 8)  # batches that goals speak of, measured first
BATCHES = (1, 2, 4, 8, 16)
LEAST_TOKENS = 40
"""Two rounds, of up to seventeen tokens each with `auto`, are not counted; some more must be."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What was asked for, and what follows from the device."""

    model: str
    draft: str | None
    device: torch.device
    dtype: str | None
    batches: tuple[int, ...]
    prompt_length: int
    new_tokens: int
    turns: int  # at most: another one begins only if it will end within `seconds_a_batch`
    seconds_a_batch: float
    most_seconds: float  # parts that would begin later are left out
    alpha_tokens: int
    memory_lengths: tuple[int, ...]
    wide_lengths: tuple[int, ...]  # of the pair with a large vocabulary
    peer_tokens: int  # few: transformers takes long
    seed: int

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(batch for batch in LEADING if batch in self.batches) or self.batches[:1]

    @property
    def following(self) -> tuple[int, ...]:
        return tuple(batch for batch in reversed(self.batches) if batch not in self.leading)


def choose_settings(asked: DecodeOptions) -> DecodeSettings:
    """Defaults for whatever was not asked for."""
    place = choose_device(asked.device)
    on_gpu = place.type == "cuda"
    chosen = DecodeSettings(
        model=asked.model or default_pair(place), draft=asked.draft, device=place, dtype=asked.dtype, batches=BATCHES,
        prompt_length=448 if on_gpu else 32, new_tokens=128 if on_gpu else 48, turns=4 if on_gpu else 2,
        seconds_a_batch=10.0 if on_gpu else 5.0, most_seconds=150.0, alpha_tokens=1024 if on_gpu else 256,
        memory_lengths=(1, 4, 8, 16), wide_lengths=(8,), peer_tokens=24 if on_gpu else 12, seed=asked.seed,
    )  # fmt: skip
    if asked.quick:
        tokens = max(chosen.new_tokens // 2, LEAST_TOKENS)
        chosen = replace(chosen, batches=LEADING, new_tokens=tokens, turns=1, alpha_tokens=128, memory_lengths=(8,),
                         peer_tokens=6)  # fmt: skip
    options: dict[str, Any] = {
        "batches": asked.batch_sizes, "prompt_length": asked.prompt_length, "new_tokens": asked.max_new_tokens,
        "most_seconds": asked.seconds,
    }  # fmt: skip
    chosen = replace(chosen, **{name: value for name, value in options.items() if value is not None})
    check_pair(chosen.model, chosen.draft)
    if chosen.new_tokens < LEAST_TOKENS:
        raise InvalidArgument(
            f"max_new_tokens={chosen.new_tokens}: the first two rounds are not counted; ask for {LEAST_TOKENS} or more"
        )
    return chosen
