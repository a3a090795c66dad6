"""Encoder-decoder pairs with random weights, full compute cost and an acceptance rate that is dialled in.

As in `bench.synthetic`: every block does its arithmetic and adds next to nothing to the residual stream, so the final
state still holds the code of the last token. The code is there twice, once with its sign turned, because Whisper's
norms take the mean away. The draft has few decoder layers of the target's width and shares its encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.bench.synthetic import QUIET, BigramLaw, make_bigram_law, noise_for
from forerun.errors import InvalidArgument

CODE = 64  # dimensions
WRITES = ("out_proj.weight", "fc2.weight", "Attention.o.weight", "wo.weight")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a target; its draft differs in layers alone."""

    family: str
    layers: int  # of the encoder, and as many of the decoder
    width: int
    mlp: int
    heads: int
    vocab: int
    draft_layers: int
    source: int  # tokens that a text's encoder reads; Whisper's reads windows of 30 s


SHAPES = {
    "whisper-large": Shape("whisper", 32, 1280, 5120, 20, 51865, 2, 1500),
    "t5-xxl": Shape("t5", 24, 4096, 10240, 64, 32128, 2, 512),
    "whisper-mini": Shape("whisper", 3, 160, 192, 4, 300, 1, 24),
    "t5-mini": Shape("t5", 3, 160, 192, 4, 300, 1, 20),
}


@dataclass(frozen=True, slots=True)
class Pair:
    target: Any
    draft: Any
    alpha: float  # expected at temperature 1
    shape: Shape

    @torch.inference_mode()
    def states(self, batch: int, seed: int = 0) -> Any:
        """What the encoder makes of `batch` sources."""
        generator = torch.Generator(self.target.device).manual_seed(seed)
        where = {"generator": generator, "device": self.target.device}
        encoder = self.target.get_encoder()
        if self.shape.family == "t5":
            return encoder(input_ids=torch.randint(3, self.shape.vocab, (batch, self.shape.source), **where))
        size = (batch, self.target.config.num_mel_bins, 2 * self.shape.source)
        return encoder(input_features=torch.randn(size, dtype=self.target.dtype, **where))


def build(name: str, alpha: float, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Pair:
    """Both models, made where they will run."""
    if name not in SHAPES:
        raise InvalidArgument(f"there is no pair {name!r}; choose among {', '.join(SHAPES)}")
    shape = SHAPES[name]
    law = make_bigram_law(shape.vocab, CODE, seed, device)
    noise, expected = noise_for(law, alpha, seed)
    target = _model(shape, shape.layers, law, 0.0, device, dtype, seed)
    draft = _model(replace(shape, layers=1), shape.draft_layers, law, noise, device, dtype, seed + 1)
    return Pair(target, draft, expected, shape)


@torch.no_grad()
def _model(
    shape: Shape, layers: int, law: BigramLaw, noise: float, device: torch.device, dtype: torch.dtype, seed: int
) -> Any:
    with torch.device(device):
        model = _bare(shape, layers, dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, QUIET if name.endswith(WRITES) else 0.02, generator=generator)
    decoder = model.get_decoder()
    if (positions := getattr(decoder, "embed_positions", None)) is not None:
        positions.weight.zero_()
    _engrave(decoder.embed_tokens.weight, law.tells, 1.0)
    # The norm makes a state of length sqrt(2 D) one of length sqrt(H); the head reads one of the two copies.
    reads, scale = law.reads + noise * law.error, (2 * CODE / shape.width) ** 0.5
    head = torch.zeros(shape.vocab, shape.width, device=device, dtype=dtype)
    head[:, :CODE] = (scale * reads).to(dtype)
    model.get_output_embeddings().weight = nn.Parameter(head, requires_grad=False)
    return model


def _engrave(embedding: Tensor, tells: Tensor, scale: float) -> None:
    embedding.zero_()
    embedding[:, :CODE] = (scale * tells).to(embedding.dtype)
    embedding[:, CODE : 2 * CODE] = (-scale * tells).to(embedding.dtype)


def _bare(shape: Shape, layers: int, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, T5Config, WhisperConfig

    common = {"tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1}
    if shape.family == "t5":
        t5 = T5Config(
            vocab_size=shape.vocab, d_model=shape.width, d_kv=shape.width // shape.heads, d_ff=shape.mlp,
            num_layers=shape.layers, num_decoder_layers=layers, num_heads=shape.heads,
            feed_forward_proj="gated-gelu", **common,
        )  # fmt: skip
        return AutoModelForSeq2SeqLM.from_config(t5, dtype=dtype)
    whisper = WhisperConfig(
        vocab_size=shape.vocab, d_model=shape.width, encoder_layers=shape.layers, decoder_layers=layers,
        encoder_attention_heads=shape.heads, decoder_attention_heads=shape.heads, encoder_ffn_dim=shape.mlp,
        decoder_ffn_dim=shape.mlp, max_source_positions=shape.source, bos_token_id=None, **common,
    )  # fmt: skip
    return AutoModelForSpeechSeq2Seq.from_config(whisper, dtype=dtype)
