"""Encoder-decoder models over three tokens, what they read, and the law of what each says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from exactness.rounded import RoundedCache
from forerun.drafters import Chain, DraftModel, EarlyExit, PromptLookup, Tree
from forerun.drafters.base import Drafter
from forerun.math.scaled import Scheme
from support.seq2seq import batch_of
from support.tiny import draft_of, tiny_model

STEPS, VOCAB = 3, 3
TEXTS = ((1, 2, 0, 1, 2, 2, 0), (2,), (0, 1, 1))
PROMPTS = ((1, 2), (1,), (1, 0, 2, 0, 1, 1, 2))  # of the decoder, as ragged as the sources
START = (1, 2)
SOFTEN = {"t5_gated": 0.6, "mbart": 0.5, "whisper": 0.5}


@lru_cache
def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft over three tokens: every continuation can be listed."""
    seed = 2 if family == "t5_gated" else 0  # one whose text depends on distances
    target = copy.deepcopy(tiny_model(family, seed, vocab=VOCAB, decoder_start_token_id=START[0]))
    target.get_output_embeddings().weight.data.mul_(SOFTEN[family])
    for name, weight in target.named_parameters():
        if "decoder" in name and ("relative_attention_bias" in name or "SelfAttention.o" in name):
            weight.data.mul_(3)
    return target, draft_of(target, 0.16)


@lru_cache
def sources(family: str) -> tuple[Tensor, ...]:
    if family == "whisper":
        return tuple(torch.randn(3, 8, 48, generator=torch.Generator().manual_seed(5)))
    return tuple(torch.tensor(text) for text in TEXTS)


@lru_cache
def law(family: str, row: int, own: Scheme | None = None, read: Scheme | None = None) -> Tensor:
    """Probability of every continuation of `STEPS` tokens, from full forward passes in float64.

    The decoder's own keys and those of the source are rounded by schemes, where these are given.
    """
    exact = copy.deepcopy(pair(family)[0]).double()
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in given(family, [row]).items()}
    histories, mass = torch.tensor([PROMPTS[row]]), torch.ones(1, dtype=torch.float64)
    with torch.no_grad():
        states = exact.get_encoder()(**inputs)
        for _ in range(STEPS):
            many = [states.last_hidden_state.expand(len(histories), -1, -1)]
            cache = EncoderDecoderCache(RoundedCache(own), RoundedCache(read)) if own or read else None
            logits = exact(
                encoder_outputs=many, decoder_input_ids=histories, past_key_values=cache, use_cache=cache is not None
            ).logits[:, -1]
            mass = (mass[:, None] * logits.softmax(-1)).flatten()
            more = torch.arange(VOCAB).repeat(len(histories))
            histories = torch.cat([histories.repeat_interleave(VOCAB, 0), more[:, None]], dim=1)
    return mass.view([VOCAB] * STEPS)


def given(family: str, rows: Sequence[int]) -> dict[str, Tensor]:
    return batch_of(family, [sources(family)[row] for row in rows])


def make_drafter(name: str, family: str) -> Drafter:
    draft = copy.deepcopy(pair(family)[1])
    makers: dict[str, Any] = {
        "model": lambda: DraftModel(draft),
        "shared": lambda: DraftModel(draft, shares_encoder=True),
        "exit": lambda: EarlyExit(1),
        "chain": lambda: Chain(PromptLookup(min_ngram=2), DraftModel(draft, stop_below=0.4)),
        "tree": lambda: Tree(DraftModel(draft), nodes=5, width=2, siblings="sampled"),
    }
    made: Drafter = makers[name]()
    return made
