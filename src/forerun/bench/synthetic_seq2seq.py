"""Encoder-decoder pairs with random weights, full compute cost and an acceptance rate that is dialled in.

As in `bench.synthetic`: every block of the decoder does all its arithmetic, cross-attention included, and adds next to
nothing, so that the last token's code reaches the head. The encoder computes all it would; its findings change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.bench.synthetic import QUIET, Code, SyntheticPair, make_code, noise_for
from forerun.errors import InvalidArgument

WRITES = (
    "SelfAttention.o.weight", "EncDecAttention.o.weight", "DenseReluDense.wo.weight",  # T5
    "out_proj.weight", "fc2.weight", "embed_positions.weight",  # Whisper
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seq2SeqSize:
    """The shape of an encoder-decoder model."""

    encoder_layers: int
    decoder_layers: int
    hidden: int
    mlp: int
    heads: int
    vocab: int
    code: int  # dimensions of the residual stream that carry the token
    source: int = 1500  # positions of a Whisper's encoder


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of model is made from a size, and what its final norm does to the code."""

    build: Callable[[Seq2SeqSize], Any]  # on the default device, in the default type
    is_centred: bool  # its norm takes the mean away: the code is written twice, once with its sign turned
    shares_encoder: bool  # its drafts read the target's encoder


def _t5(size: Seq2SeqSize) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocab, d_model=size.hidden, d_kv=size.hidden // size.heads, d_ff=size.mlp,
        num_layers=size.encoder_layers, num_decoder_layers=size.decoder_layers, num_heads=size.heads,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))  # this class ties it regardless
    return model


def _whisper(size: Seq2SeqSize) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=size.vocab, num_mel_bins=80, d_model=size.hidden, max_source_positions=size.source,
        encoder_layers=size.encoder_layers, decoder_layers=size.decoder_layers,
        encoder_attention_heads=size.heads, decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.mlp, decoder_ffn_dim=size.mlp, tie_word_embeddings=False,
        decoder_start_token_id=2, bos_token_id=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


FAMILIES = {"t5": Family(_t5, is_centred=False, shares_encoder=False), "whisper": Family(_whisper, True, True)}
SIZES = {
    # Leviathan et al. draft for the first with T5-small's six layers of 512; two wide ones cost a GPU less time.
    "t5-xxl": Seq2SeqSize(24, 24, 4096, 10240, 64, 32128, 64),
    "t5-draft": Seq2SeqSize(2, 2, 1024, 2816, 16, 32128, 64),
    # Distil-Whisper's draft has the first and the last decoder layer, and the target's encoder.
    "whisper-large-v2": Seq2SeqSize(32, 32, 1280, 5120, 20, 51865, 64),
    "whisper-draft": Seq2SeqSize(1, 2, 1280, 5120, 20, 51865, 64),
    "t5-tiny": Seq2SeqSize(2, 4, 128, 256, 4, 512, 16),
    "t5-mini": Seq2SeqSize(1, 1, 64, 128, 2, 512, 16),
    "whisper-tiny": Seq2SeqSize(2, 4, 128, 256, 4, 512, 16, source=24),
    "whisper-mini": Seq2SeqSize(1, 1, 128, 256, 4, 512, 16, source=24),
}
DRAFTS = {
    "t5-xxl": "t5-draft", "whisper-large-v2": "whisper-draft", "t5-tiny": "t5-mini", "whisper-tiny": "whisper-mini",
}  # fmt: skip


def family_of(name: str) -> Family:
    if name not in DRAFTS:
        raise InvalidArgument(f"no synthetic encoder-decoder pair {name!r}; choose among {', '.join(DRAFTS)}")
    return FAMILIES[name.partition("-")[0]]


def build_seq2seq_pair(
    name: str,
    alpha: float = 0.87,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
) -> SyntheticPair:
    """The target `name` and its draft, where they will run; the noise gives the acceptance `alpha` at temperature 1.

    A draft that shares its target's encoder has the target's own module there.
    """
    from forerun.loading.load import choose_device, choose_dtype

    family, size = family_of(name), SIZES[name]
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    code = make_code(size.vocab, size.code, seed, place)
    noise, rate = noise_for(code, alpha, seed)
    target = _build(family, size, code, 0.0, place, kind, seed)
    draft = _build(family, SIZES[DRAFTS[name]], code, noise, place, kind, seed + 1)
    if family.shares_encoder:
        draft.model.encoder = target.model.encoder
    return SyntheticPair(target, draft, noise, rate)


@torch.no_grad()
def _build(
    family: Family, size: Seq2SeqSize, code: Code, noise: float, device: torch.device, dtype: torch.dtype, seed: int
) -> Any:
    """Made in place and in its type: no copy of eleven billion weights is on the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = family.build(size).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            writes = "decoder" in name and name.endswith(WRITES)
            weight.normal_(0.0, QUIET if writes else 0.02, generator=generator)
    _engrave(model, size, code, noise, family.is_centred)
    return model


def _engrave(model: Any, size: Seq2SeqSize, code: Code, noise: float, is_centred: bool) -> None:
    """In through the embedding, out through the head; the scale undoes the final norm."""
    embedding = model.get_decoder().get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    embedding.zero_()
    head.zero_()
    written = torch.cat([code.tells, -code.tells], dim=1) if is_centred else code.tells
    embedding[:, : written.shape[1]] = written.to(embedding.dtype)
    scale = (written.shape[1] / size.hidden) ** 0.5
    head[:, : size.code] = (scale * (code.reads + noise * code.error)).to(head.dtype)


def a_source(model: Any, batch: int, seed: int = 0, length: int = 128) -> dict[str, Tensor]:
    """Keyword arguments of `generate` for a batch of sources: text of `length` tokens, or half a minute of sound."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.model_type == "t5":
        ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
        return {"input_ids": ids.to(model.device)}
    frames = 2 * model.config.max_source_positions
    sound = torch.randn(batch, model.config.num_mel_bins, frames, generator=generator)
    return {"input_features": sound.to(model.device, model.dtype)}
