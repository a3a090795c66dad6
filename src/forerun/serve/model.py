"""The model that is served: its names, its limits, its tokens as text and as bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from transformers import GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from forerun.decoder import SpeculativeDecoder
from forerun.errors import InvalidArgument
from forerun.inputs import render_chat, text_ids, tokenize_rendered
from forerun.keywords import id_set
from forerun.serve.call_formats import CallFormat, find_format
from forerun.serve.errors import ApiError, refused, shortened
from forerun.serve.grammar import make_tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that is no character
SPACE = "\u2581"  # and a space


@dataclass(frozen=True, slots=True)
class Card:
    """What clients are told of the one model there is."""

    name: str
    created: int  # seconds since 1970
    drafter_name: str
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "forerun"}
        return about | self.facts | {"drafter": self.drafter_name}

    def check_name(self, asked: str | None) -> None:
        """A client that asks for another model is told."""
        if asked is not None and asked != self.name:
            message = f"there is no model {shortened(asked)!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, eq=False)
class ServedModel:
    """What is known of a model without having it: whoever speaks with clients may be another process."""

    tokenizer: Any
    name: str
    created: int  # seconds since 1970
    drafter_name: str
    device: str
    vocab_size: int
    context_length: int | None
    """Tokens that prompt and answer may have together: the model's bound, or what its cache holds if less."""
    stop_ids: frozenset[int]
    """End tokens, from where `decoder.generate` has them."""
    takes_predictions: bool
    byte_alphabet: dict[str, int] = field(default_factory=lambda: {char: b for b, char in bytes_to_unicode().items()})

    @classmethod
    def of(
        cls, decoder: SpeculativeDecoder, tokenizer: Any, name: str, created: int, drafter_name: str = "auto"
    ) -> ServedModel:
        """A decoder with the tokenizer that reads and writes for it; what has no text to serve is refused."""
        if decoder.target.config.is_encoder_decoder:
            raise InvalidArgument(f"{name} is an encoder-decoder model, which is not served: use forerun generate")
        if tokenizer is None or not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise InvalidArgument(f"{name} has no tokenizer of transformers, which serving text needs")
        target, drafter = decoder.engine.target, decoder.engine.drafting.drafter
        limits = [limit for limit in (target.context_length, target.cache.num_tokens) if limit is not None]
        config = decoder.target.generation_config or GenerationConfig()
        return cls(
            tokenizer,
            name,
            created,
            drafter_name,
            decoder.target.device.type,
            target.vocab_size,
            min(limits, default=None),
            id_set(config.eos_token_id),
            drafter is not None and drafter.takes_predictions,
        )

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        return make_tokenizer(self.tokenizer, self.vocab_size, self.stop_ids)

    @property
    def card(self) -> Card:
        return Card(self.name, self.created, self.drafter_name, {"max_model_len": self.context_length})

    def check_drafter(self, asked: str | None) -> None:
        if asked not in (None, self.drafter_name):
            raise refused("speculation.drafter", f"this server drafts with {self.drafter_name!r} and no other")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return text_ids(self.tokenizer, text) if add_special_tokens else tokenize_rendered(self.tokenizer, text)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How it writes calls of tools; None where its chat template does not say, or says it in an unknown way."""
        return find_format(self.tokenizer)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise refused("messages", "this model has no chat template: use /v1/completions", "no_chat_template")
        try:
            return tokenize_rendered(self.tokenizer, render_chat(self.tokenizer, messages, tools))
        except InvalidArgument as error:  # a template that does not know a role, or wants another order
            raise refused("messages", str(error).removeprefix("messages: ")) from error

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise refused(param, f"the vocabulary ends at token {self.vocab_size - 1}")

    def token_bytes(self, token: int) -> bytes:
        """What a token writes, which may be a part of a character. Kept: answers name tokens again and again."""
        written = self._bytes.get(token)
        if written is None:
            written = self._bytes[token] = self._read_bytes(token)
        return written

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """By token, of those that were asked for."""
        return {}

    def _read_bytes(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's table may be larger than the vocabulary
            return b""
        if token in self._special:
            return str(piece).encode()
        if byte := BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if self._is_byte_level and all(char in self.byte_alphabet for char in piece):
            return bytes(self.byte_alphabet[char] for char in piece)
        return str(piece).replace(SPACE, " ").encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether characters of the vocabulary stand for bytes, as in GPT-2's."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in repr(backend.decoder)
