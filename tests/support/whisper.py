"""A random Whisper with windows of one second, a vocabulary one can read, and all of Whisper's special tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperFeatureExtractor

from support.tiny import tiny_model

WORDS = 40  # tokens 0 to 39
END, START, GERMAN, ENGLISH, TRANSLATE, TRANSCRIBE, BEFORE, SILENCE, NO_TIMES = range(WORDS, WORDS + 9)
FIRST_TIME = NO_TIMES + 1
STEPS = 50  # a window has so many encoder positions, each worth a fiftieth of a second
VOCAB = FIRST_TIME + STEPS + 1
LENGTH = 40  # tokens of a window at most


class Processor:
    """As much of a WhisperProcessor as is used."""

    def __init__(self) -> None:
        self.feature_extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        self.tokenizer = tokenizer()


def tokenizer() -> Any:
    names = [f"Ġw{i}" for i in range(WORDS)]
    names += ["<|end|>", "<|start|>", "<|de|>", "<|en|>", "<|tr|>", "<|sc|>", "<|prev|>", "<|nospeech|>", "<|notimes|>"]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": names[START:]})
    return made


def tiny_whisper(seed: int = 0, *, multilingual: bool = False) -> Any:
    """A model of its own for the test, with a generation configuration like the published ones."""
    model = copy.deepcopy(
        tiny_model("whisper", seed, vocab=VOCAB, max_source_positions=STEPS, max_target_positions=LENGTH,
                   decoder_start_token_id=START, pad_token_id=END, eos_token_id=END, bos_token_id=END)
    )  # fmt: skip
    with torch.no_grad():  # texts that end now and then, and words that hold their own against fifty timestamps
        model.model.decoder.embed_tokens.weight[END] *= 2.0
        model.model.decoder.embed_tokens.weight[:WORDS] *= 1.3
    config = GenerationConfig(
        decoder_start_token_id=START, pad_token_id=END, eos_token_id=END, bos_token_id=END, max_length=LENGTH,
        suppress_tokens=[1, 7, START, GERMAN, ENGLISH, TRANSLATE, TRANSCRIBE, BEFORE, SILENCE],
        begin_suppress_tokens=[2, END],
    )  # fmt: skip
    config.no_timestamps_token_id, config.prev_sot_token_id = NO_TIMES, BEFORE
    config.max_initial_timestamp_index, config.return_timestamps = 10, False
    config.is_multilingual = multilingual
    if multilingual:
        config.lang_to_id = {"<|de|>": GERMAN, "<|en|>": ENGLISH}
        config.task_to_id = {"translate": TRANSLATE, "transcribe": TRANSCRIBE}
    model.generation_config = config
    return model
