"""A real language model small enough for every test run: 260,032 weights that tell children's stories.

The checkpoint and its tokenizer are in the binary formats of llama2.c, and prompts come from Spec-Bench.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from support.data import data_folder, needs

CHECKPOINT = "stories260K/stories260K.bin"
VOCABULARY = "stories260K/tok512.bin"
QUESTIONS = "spec_bench/question.jsonl"

needs_stories = needs(CHECKPOINT, VOCABULARY)
needs_spec_bench = needs(QUESTIONS)

BEGIN = 1  # begin-of-text token; 2 ends a text, 3 to 258 are the bytes
FIRST_BYTE = 3


@dataclass(frozen=True)
class Vocabulary:
    """Pieces of text and how much the tokenizer likes each."""

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]

    def encode(self, text: str) -> list[int]:
        """Begin token, then characters merged pair by pair, the best-scored pair first."""
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        tokens = [token for char in " " + text for token in _spell(char.encode(), ids)] if text else []
        while found := self._best_pair(tokens, ids):
            place, merged = found
            tokens[place : place + 2] = [merged]
        return [BEGIN, *tokens]

    def decode(self, tokens: list[int]) -> str:
        """The text, with special tokens left out and the leading space removed."""
        text = b"".join(self._bytes_of(token) for token in tokens if token >= FIRST_BYTE)
        return text.decode("utf-8", "replace").removeprefix(" ")

    def _best_pair(self, tokens: list[int], ids: dict[bytes, int]) -> tuple[int, int] | None:
        pairs = [self.pieces[a] + self.pieces[b] for a, b in pairwise(tokens)]
        known = [(self.scores[ids[pair]], -place) for place, pair in enumerate(pairs) if pair in ids]
        if not known:
            return None
        place = -max(known)[1]
        return place, ids[pairs[place]]

    def _bytes_of(self, token: int) -> bytes:
        piece = self.pieces[token]
        is_byte = len(piece) == 6 and piece.startswith(b"<0x")
        return bytes([int(piece[3:5], 16)]) if is_byte else piece


@dataclass(frozen=True)
class Stories:
    """The model in eval mode, float32, and its vocabulary. Shared by all tests: copy the model before you change it."""

    model: LlamaForCausalLM
    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.vocabulary.decode(tokens)


def load_stories() -> Stories:
    """The model as it was trained; its end token stays off so that lengths are fixed."""
    model = _read_checkpoint(data_folder() / CHECKPOINT)
    return Stories(model, _read_vocabulary(data_folder() / VOCABULARY, model.config.vocab_size))


def spec_bench_prompts(category: str, n: int) -> list[str]:
    """First turns of the first `n` questions of a category (`qa`, `summarization`, `math_reasoning`, `coding`, ...)."""
    lines = (data_folder() / QUESTIONS).read_text(encoding="utf-8").splitlines()
    questions = [question for question in map(json.loads, lines) if question["category"] == category]
    if len(questions) < n:
        raise ValueError(f"{n} prompts of {category!r} asked for, {len(questions)} there")
    return [question["turns"][0] for question in questions[:n]]


def _spell(char: bytes, ids: dict[bytes, int]) -> list[int]:
    return [ids[char]] if char in ids else [byte + FIRST_BYTE for byte in char]


def _read_vocabulary(path: Path, size: int) -> Vocabulary:
    """An int32 header, then for each piece a float32 score, an int32 length and the bytes."""
    data, start = path.read_bytes(), 4
    pieces, scores = [], []
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, start)
        pieces.append(data[start + 8 : start + 8 + length])
        scores.append(score)
        start += 8 + length
    return Vocabulary(tuple(pieces), tuple(scores))


def _read_checkpoint(path: Path) -> LlamaForCausalLM:
    """Seven int32 sizes, then float32 tensors, each kind stacked over the layers."""
    data = bytearray(path.read_bytes())
    width, inner, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", data)
    config = LlamaConfig(
        vocab_size=abs(vocab), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        rms_norm_eps=1e-5, tie_word_embeddings=vocab > 0, bos_token_id=BEGIN, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights = dict(_named_weights(torch.frombuffer(data, dtype=torch.float32, offset=28), config))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def _named_weights(flat: Tensor, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head = width // config.num_attention_heads
    kv_width = head * config.num_key_value_heads
    stacked = {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width), "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width), "mlp.down_proj": (width, inner), "mlp.up_proj": (inner, width),
    }  # fmt: skip
    take = _Reader(flat)
    yield "model.embed_tokens.weight", take(config.vocab_size, width)
    for name, shape in stacked.items():
        for layer, weight in enumerate(take(layers, *shape)):
            rotated = name.endswith(("q_proj", "k_proj"))
            yield f"model.layers.{layer}.{name}.weight", _halves(weight, head) if rotated else weight
    yield "model.norm.weight", take(width)
    take(config.max_position_embeddings, head)  # tables of cosines and sines that nobody reads any more
    if not config.tie_word_embeddings:
        yield "lm_head.weight", take(config.vocab_size, width)
    assert take.start == flat.numel(), "the file is longer or shorter than its header says"


class _Reader:
    """Cuts tensors off a flat array, one after the other."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.start = flat, 0

    def __call__(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        self.start += size
        return self.flat[self.start - size : self.start].view(shape)


def _halves(weight: Tensor, head: int) -> Tensor:
    """From rotating neighbours (0, 1), (2, 3) ... to rotating halves, as transformers does."""
    return weight.view(-1, head // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
