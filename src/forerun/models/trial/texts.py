"""What a trial's rows say: random tokens, and random encoder states for a model that reads some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer

SOURCES = (6, 11, 6)  # encoder states: of two lengths, since the model itself is run once for each
Tokens = tuple[int, ...]
SourcedText = tuple[int, Tokens]  # whose source is read, and a text


class Texts:
    """Always the same ones, from a generator of their own."""

    def __init__(self, scorer: Scorer) -> None:
        self._generator = torch.Generator().manual_seed(20)
        self._plain = plain_tokens(scorer)
        self.states: tuple[Tensor, ...] = ()  # [S, H] each, none for a causal model
        if isinstance(scorer, Seq2SeqScorer):
            drawn = (torch.randn(length, scorer.encoder.width, generator=self._generator) for length in SOURCES)
            self.states = tuple(one.to(scorer.device, scorer.model.dtype) for one in drawn)

    def draw(self, length: int) -> Tokens:
        chosen = torch.randint(len(self._plain), (length,), generator=self._generator).tolist()
        return tuple(self._plain[i] for i in chosen)


def plain_tokens(scorer: Scorer) -> list[int]:
    """Ids that stand for nothing but text: no padding, no image, no end."""
    special: set[int] = set()
    for config in (scorer.model.config, scorer.model.config.get_text_config(decoder=True)):
        for name, value in vars(config).items():
            if "token" in name:
                special |= set(_whole_numbers(value))
    return [token for token in range(scorer.vocab_size) if token not in special]


def _whole_numbers(value: Any) -> Iterator[int]:
    """Those in a setting, however deep: configurations keep whatever config.json has."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(part)
