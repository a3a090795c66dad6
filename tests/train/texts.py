"""Training data in memory, and options small enough for a test."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.train.options import TrainOptions
from forerun.train.shards import TrainingText
from support.tiny import tiny_model


class Memory:
    """What `Shards` gives, without a disk."""

    def __init__(self, sequences: Sequence[TrainingText], vocab_size: int, top_k: int = 0) -> None:
        self._sequences = list(sequences)
        self.vocab_size = vocab_size
        self.top_k = top_k

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def prompts(self) -> range:
        return range(len(self._sequences))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(s.tokens.numpy().tobytes() for s in self._sequences)).hexdigest()

    def sequence(self, i: int, /) -> TrainingText:
        return self._sequences[i]


@torch.no_grad()
def written_by(model: PreTrainedModel, num: int, length: int, seed: int = 0, first: int = 1) -> Tensor:
    """[num, length] tokens drawn from the model at temperature 1 by transformers itself."""
    torch.manual_seed(seed)
    ids = torch.full((num, 1), first)
    made: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length - 1
    )
    return made


def memory(tokens: Tensor, vocab_size: int, prompt_length: int = 2) -> Memory:
    return Memory([TrainingText(row, prompt_length) for row in tokens], vocab_size)


def small(**changes: Any) -> TrainOptions:
    settings: dict[str, Any] = {
        "batch_tokens": 256, "max_length": 32, "hold_out": 8, "log_every": 5, "steps": 10, "unroll": 2,
        "learning_rate": 2e-2, "evaluate_every": 1000,
    }  # fmt: skip
    return TrainOptions(**{**settings, **changes})


@lru_cache
def markov_target(vocab: int = 24) -> PreTrainedModel:
    """A target whose next token depends on the last one and nothing else: a small draft can learn it in seconds."""
    model = copy.deepcopy(tiny_model("llama", vocab=vocab))
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    return model
