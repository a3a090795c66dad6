"""What each keyword of `generate` may be. Checked values are plain: Python numbers, lists of them, strings, tuples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.arguments import (
    FLOAT32_MAX,
    INT64_MAX,
    entries,
    flag,
    integer,
    list_of,
    mapping,
    methods,
    number,
    one_or_several,
    refuse,
    shown,
)
from forerun.engine.request import MOST_NEW_TOKENS, check_processor, check_stop_string

PER_ROW_PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
MOST_SEQUENCES = 1 << 20  # of one call; each is a request with a row of its own

Check = Callable[[str, Any], Any]


def _whole(low: int, high: int = INT64_MAX, remedy: str = "") -> Check:
    return lambda name, value: integer(name, value, low, high, remedy)


def _per_prompt(check: Check) -> Check:
    return lambda name, value: one_or_several(name, value, check)


def _ids(check: Check = integer) -> Check:
    return lambda name, value: list_of(name, value, check, "must be a list of token ids")


def _some_ids(check: Check = integer) -> Check:
    """One id, or a list of them, as a list."""

    def checked(name: str, value: Any) -> list[int]:
        found = one_or_several(name, value, check)
        return found if isinstance(found, list) else [found]

    return checked


def _end_ids(name: str, value: Any) -> list[int]:
    found: list[int] = _some_ids(_whole(0))(name, value)
    if not found:
        refuse(name, value, "must be a token id or several; leave it out to force none")
    return found


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [check_stop_string(name, value)]
    return list_of(name, value, check_stop_string, "must be a string or a list of strings")


def _words(name: str, value: Any) -> list[list[int]]:
    return list_of(name, value, _word, "must be a list of lists of token ids")


def _word(name: str, value: Any) -> list[int]:
    found = list_of(name, value, _whole(0), "must be a list of token ids, each list one word")
    if not found:
        refuse(name, value, "is an empty word; remove it")
    return found


def _sequence_bias(name: str, value: Any) -> dict[tuple[int, ...], float]:
    """As a dictionary from tuples of ids, or as transformers writes it in JSON: a list of [ids, bias]."""
    remedy = "must be a dictionary from tuples of token ids to numbers, or a list of [ids, number]"
    pairs = value.items() if isinstance(value, Mapping) else entries(value)
    if pairs is None:
        refuse(name, value, remedy)
    found = {}
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            refuse(name, value, remedy)
        found[tuple(_word(f"{name}, a sequence", pair[0]))] = number(
            f"{name}[{shown(pair[0])}]", pair[1], lambda x: x == -math.inf or abs(x) <= FLOAT32_MAX,
            "must be a number of float32's range, or -inf to forbid the sequence",
        )  # fmt: skip
    return found


def _processor_list(name: str, value: Any) -> list[Any]:
    remedy = "must be a list of processors; put a single one into a list"
    if callable(value) and not isinstance(value, Sequence):
        refuse(name, value, remedy)
    return list_of(name, value, check_processor, remedy)


def _logprobs_asked(name: str, value: Any) -> int | bool:
    return (
        value
        if isinstance(value, bool)
        else integer(name, value, 0, remedy="must be >= 0, or None for no log-probabilities")
    )


def check_tokenizer(name: str, value: Any) -> Any:
    """Something that turns ids into text, for stop strings, or tells its vocabulary, for drafters: all we ask of it."""
    verb = "get_vocab" if hasattr(value, "get_vocab") else "decode"
    return methods(name, value, (verb,), "must be a tokenizer; load one with AutoTokenizer.from_pretrained")


def _streamer(name: str, value: Any) -> Any:
    return methods(name, value, ("put", "end"), "must have the methods put and end, as transformers' streamers do")


def _bias(name: str, value: Any) -> Mapping[Any, Any]:
    return mapping(name, value, "must be a dictionary from token ids to numbers")


def _seconds(name: str, value: Any) -> float:
    return number(
        name, value, lambda x: 0 <= x < math.inf, "must be seconds >= 0 and finite; leave it out for no limit"
    )


# What each keyword may be. Ranges of sampling parameters are `SamplingParams`' to check, inputs of an encoder those of
# `forerun.sources`.
_NEW_TOKENS = _whole(1, MOST_NEW_TOKENS)
CHECKS: dict[str, Check] = {
    "max_new_tokens": _per_prompt(_NEW_TOKENS),
    "max_length": _NEW_TOKENS,
    "min_new_tokens": _whole(0, MOST_NEW_TOKENS),
    "do_sample": flag,
    **{name: _per_prompt(number) for name in PER_ROW_PARAMS},
    "top_k": _per_prompt(lambda name, value: None if value is None else integer(name, value)),
    "logit_bias": _bias,
    "seed": _per_prompt(integer),
    "request_ids": _ids(_whole(0, 2**32 - 1, "must fit 32 bits")),
    "eos_token_id": _some_ids(),
    "pad_token_id": integer,
    "stop_strings": _texts,
    "num_return_sequences": _whole(1, MOST_SEQUENCES),
    "logits_processor": _processor_list,
    "no_repeat_ngram_size": _whole(0),
    "bad_words_ids": _words,
    "suppress_tokens": _ids(),
    "begin_suppress_tokens": _ids(),
    "forced_bos_token_id": _whole(0),
    "forced_eos_token_id": _end_ids,
    "sequence_bias": _sequence_bias,
    "logprobs": _logprobs_asked,
    "max_time": _seconds,
    "tokenizer": check_tokenizer,
    "streamer": _streamer,
    "return_dict_in_generate": flag,
    "use_cache": flag,
}
