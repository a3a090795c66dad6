"""The byte-level BPE tokenizer written in a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from forerun.errors import UnsupportedModel
from forerun.loading.gguf import GgufFile

_CONTROL = 3  # GGUF's number for a token that is never made from text
_NORMAL = 1
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})  # entries for which llama.cpp cuts as GPT-2 does


def build_tokenizer(file: GgufFile) -> Any:
    """A fast transformers tokenizer with the file's vocabulary, merges, special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    _refuse_what_is_not_plain(file)
    return PreTrainedTokenizerFast(
        tokenizer_object=_build_fast(file),
        bos_token=_special(file, "bos"),
        eos_token=_special(file, "eos"),
        unk_token=_special(file, "unknown"),
        pad_token=_special(file, "padding"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_length=file.need("llama.context_length"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _refuse_what_is_not_plain(file: GgufFile) -> None:
    if (model := file.need("tokenizer.ggml.model")) != "gpt2":
        raise UnsupportedModel(
            f"{file.path} has a {model!r} tokenizer; this reader knows byte-level BPE ('gpt2') alone"
        )
    if file.metadata.get("tokenizer.ggml.add_bos_token"):
        raise UnsupportedModel(f"{file.path} puts a token before every text, which this reader does not do")
    if unknown := set(file.need("tokenizer.ggml.token_type")) - {_NORMAL, _CONTROL}:
        raise UnsupportedModel(
            f"{file.path} has tokens of kinds {sorted(unknown)}; this reader knows normal and control ones"
        )


def _build_fast(file: GgufFile) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens = file.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    fast = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = _pre_tokenizer(file)
    fast.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, file.need("tokenizer.ggml.token_type"), strict=True) if kind == _CONTROL]
    fast.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return fast


def _pre_tokenizer(file: GgufFile) -> Any:
    """How text is cut before merging.

    "smollm" cuts out every digit first. transformers' own GGUF reader does not know this entry, so it merges a run of
    spaces before a digit differently from the tokenizer the model was trained with.
    """
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match file.metadata.get("tokenizer.ggml.pre"):
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        case "gpt-2":
            return words
        case other:
            raise UnsupportedModel(f"{file.path} cuts its text by {other!r}; this reader knows 'smollm' and 'gpt-2'")


def why_uncertain(file: GgufFile) -> str | None:
    """Why transformers may cut text otherwise than the model was trained with; None where it knows how.

    It takes an entry that it does not know for GPT-2's, without a word.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # of another version, which may know as much
        return None
    cut = file.metadata.get("tokenizer.ggml.pre")
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or cut in GGUF_PRE_TOKENIZER_SPLITS or cut in _AS_GPT2:
        return None
    return (
        f"{str(file.path)!r} cuts its text by {cut!r}, which transformers does not know: token ids may differ from "
        "those the model was trained with; take the tokenizer of the model's own folder or Hub name"
    )


def _special(file: GgufFile, role: str) -> str | None:
    token = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if token is None else str(file.need("tokenizer.ggml.tokens")[token])
