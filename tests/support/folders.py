"""Models with a byte tokenizer, saved as a user would have them: a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|end|>", "<|start|>")
VOCAB = 258


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, so that most characters beyond ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    tokenizer.chat_template = template
    return tokenizer


PIECES = ("\u2581", "\u2581\u2581", "\u2581a", "\u2581hello", "\u2581world", "a", "b", "lo", ".", "\u00e9", "\ufffd")


def sentencepiece_tokenizer(template: str | None = TEMPLATE, scheme: str = "strip") -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces that bring their space, a decoder that takes the first one away, bytes for what is rare.

    By `scheme`: "strip" takes it from the text, "metaspace" from the first token, as T5's does.
    """
    rest = "abcdefghijklmnopqrstuvwxyz\n|<>"
    plain = dict.fromkeys((*PIECES, *rest))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", "<s>", "</s>", *bytes_, *plain]
    core = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    if scheme == "strip":
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        parts = [decoders.ByteFallback(), decoders.Metaspace()]
    core.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save(folder: Path, model: Any, template: str | None = TEMPLATE) -> str:
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return str(folder)
