"""A tokenizer for models that speak no language: made-up words, decoded by the library that decodes real ones."""

from __future__ import annotations

from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\u0120"  # how byte-level vocabularies write a space


def made_up_tokenizer(size: int) -> Any:
    """`size` words, each with a space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({SPACE + _word(number): number for number in range(size)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _word(number: int) -> str:
    letters = LETTERS[number % len(LETTERS)]
    while number := number // len(LETTERS):
        letters += LETTERS[number % len(LETTERS)]
    return letters
