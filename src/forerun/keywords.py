"""`model.generate`'s keywords, read the way its users mean them: honoured, or refused with the remedy."""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from forerun.arguments import (
    FLOAT32_MAX,
    INT64_MAX,
    entries,
    equal,
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
from forerun.config import LengthSettings, SamplingParams
from forerun.drafters.base import Drafter
from forerun.engine.bans import forbidden
from forerun.engine.request import MOST_NEW_TOKENS, Request, check_processor, check_stop_string
from forerun.errors import InvalidArgument, UnknownArgument
from forerun.policy.base import Policy
from forerun.types import Source


class GenerateKeywords(TypedDict, total=False):
    """What `SpeculativeDecoder.generate` takes. Those marked * may also be a list with one entry a prompt."""

    max_new_tokens: int | Sequence[int]  # * default 128
    max_length: int  # prompt and output together, pads not counted
    min_new_tokens: int
    do_sample: bool  # default: whether a sampling parameter was given
    temperature: float | Sequence[float]  # *
    top_k: int | Sequence[int]  # *
    top_p: float | Sequence[float]  # *
    min_p: float | Sequence[float]  # *
    repetition_penalty: float | Sequence[float]  # *
    presence_penalty: float | Sequence[float]  # *
    frequency_penalty: float | Sequence[float]  # *
    logit_bias: Mapping[int, float]
    seed: int | Sequence[int] | None  # * the same call then gives the same tokens; None draws one and reports it
    request_ids: Sequence[int]  # keys of the random numbers; default: the row's index in the call
    eos_token_id: int | Sequence[int] | None  # default: the model's; None: no token ends a row
    pad_token_id: int
    stop_strings: str | Sequence[str]
    num_return_sequences: int
    logits_processor: Sequence[Any]
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    forced_bos_token_id: int
    forced_eos_token_id: int | Sequence[int]
    sequence_bias: Any
    logprobs: int | bool | None  # n alternatives beside each token's own
    max_time: float  # seconds of decoding; compiling and recording kernels is not counted
    tokenizer: Any
    drafter: Drafter | str | Path | None  # for this call, instead of the decoder's; None or "off" decodes plainly
    policy: str | int | Policy  # for this call, instead of the decoder's
    streamer: Any
    generation_config: GenerationConfig
    return_dict_in_generate: bool  # accepted: the result always carries everything
    use_cache: bool
    # Of encoder-decoder models, read by `forerun.inputs`
    input_features: Tensor
    input_values: Tensor
    encoder_outputs: Any  # [B, S, H] states, or the encoder's own output
    decoder_input_ids: Tensor
    decoder_attention_mask: Tensor
    decoder_start_token_id: int | Sequence[int]


PER_ROW_PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name != "logit_bias")
MOST_SEQUENCES = 1 << 20  # of one call; each is a request with a row of its own
KNOWN = frozenset(GenerateKeywords.__annotations__)
NEUTRAL = {"temperature": (0, 1), "top_k": (0,), "top_p": (1,), "min_p": (0,)}  # of sampling, beside greedy decoding
SAMPLING = tuple(NEUTRAL)

# Settings of transformers that Forerun does not offer; their neutral values do nothing and may be passed.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1, None), "beam search is not sampling; use model.generate"),
    "num_beam_groups": ((1, None), "beam search is not sampling; use model.generate"),
    "constraints": ((None, []), "constrained beam search is not sampling; use model.generate"),
    "force_words_ids": ((None, []), "constrained beam search is not sampling; use model.generate"),
    "penalty_alpha": ((None, 0), "contrastive search is not offered; use model.generate"),
    "dola_layers": ((None,), "contrasting layers (DoLa) is not offered; use model.generate"),
    "top_h": ((None,), "use top_p or min_p"),
    "typical_p": ((1.0, None), "use top_p or min_p"),
    "epsilon_cutoff": ((0.0, None), "use min_p"),
    "eta_cutoff": ((0.0, None), "use min_p"),
    "guidance_scale": ((1, 1.0, None), "classifier-free guidance is not offered; use model.generate"),
    "encoder_repetition_penalty": ((1.0, None), "use repetition_penalty"),
    "encoder_no_repeat_ngram_size": ((0, None), "use no_repeat_ngram_size"),
    "exponential_decay_length_penalty": ((None,), "use max_new_tokens"),
    "min_length": ((0, None), "use min_new_tokens"),
    "token_healing": ((False, None), "heal the prompt's last token before the call, as model.heal_tokens does"),
    "stopping_criteria": ((None, []), "use stop_strings, eos_token_id, max_new_tokens or max_time"),
    "prefix_allowed_tokens_fn": ((None,), "pass a logits_processor"),
    "assistant_model": ((None,), "give the drafter to SpeculativeDecoder(target, DraftModel(assistant))"),
    "prompt_lookup_num_tokens": ((None,), "give PromptLookup() to SpeculativeDecoder"),
    "assistant_early_exit": ((None,), "give EarlyExit(layers) to SpeculativeDecoder"),
    "assistant_ensemble_weight": ((None,), "give rule='ensemble:WEIGHT' to SpeculativeDecoder"),
    "use_mtp": ((False, None), "give a drafter to SpeculativeDecoder"),
    "speculation_type": ((None,), "give a drafter to SpeculativeDecoder"),
    "watermarking_config": ((None,), "pass a logits_processor"),
    "inputs_embeds": ((None,), "pass input_ids"),
    "synced_gpus": ((None, False), "run one process a GPU"),
    "output_scores": ((False, None), "ask for logprobs=n"),
    "output_logits": ((False, None), "ask for logprobs=n"),
    "output_attentions": ((False, None), "not offered"),
    "output_hidden_states": ((False, None), "not offered"),
    "cache_implementation": ((None, "dynamic"), "Forerun keeps its own ragged cache"),
    "past_key_values": ((None,), "Forerun keeps its own ragged cache"),
    "remove_invalid_values": ((False, None), "rows with NaN logits end with finish reason 'error'"),
    "renormalize_logits": ((False, None, True), ""),
    "token_type_ids": ((None,), "not used by causal language models"),
}  # fmt: skip

# Fields of a GenerationConfig that change no text of one-beam decoding, in transformers as little as here: they speak
# of beams, of how transformers drafts, keeps its cache or compiles, or of how a call without a prompt begins.
WITHOUT_EFFECT = frozenset({
    "bos_token_id", "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "cache_config", "max_cache_len",
    "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "transformers_version",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of `generate` as data: one request a sequence, in the order of the rows of the result."""

    requests: tuple[Request, ...]
    num_return_sequences: int
    pad_token_id: int
    max_time: float | None
    streamer: Any
    tokenizer: Any
    is_seeded: bool = False  # whether the caller named a seed, and so may want the same text again
    policy: Policy | None = None  # for this call, instead of the decoder's


def parse_generate_kwargs(
    prompts: Sequence[Sequence[int]],
    keywords: Mapping[str, Any],
    model_config: GenerationConfig,
    tokenizer: Any = None,
    sources: Sequence[Source] | None = None,
    vocab_size: int | None = None,
) -> GenerateCall:
    """Turn `generate`'s arguments into requests. Only ids (eos, pad) are read from the model's own configuration.

    With a `vocab_size`, ids that it does not hold are refused where they would have to be said or weighed.
    """
    if not prompts:
        raise InvalidArgument("no prompts: input_ids has no rows")
    kwargs = merged(keywords, model_config)
    if vocab_size is not None:
        _check_vocabulary(kwargs, vocab_size)
    tokenizer = kwargs.get("tokenizer", tokenizer)
    copies = kwargs.get("num_return_sequences", 1)
    if copies * len(prompts) > MOST_SEQUENCES:
        raise InvalidArgument(
            f"num_return_sequences={copies} for {len(prompts)} prompts: at most {MOST_SEQUENCES} sequences in one call"
        )
    seeds = _spread(_seed(kwargs), len(prompts), "seed")
    budgets = _budgets(kwargs, prompts)
    params = _params(kwargs, len(prompts))
    ends = _listed(kwargs.get("eos_token_id", model_config.eos_token_id))
    eos = frozenset(ends)
    ids = kwargs.get("request_ids") or list(range(len(prompts) * copies))
    if len(ids) != len(prompts) * copies or len(set(ids)) != len(ids):
        raise InvalidArgument(f"request_ids={shown(ids)}: give {len(prompts) * copies} different ids, one a sequence")
    requests = tuple(
        Request(
            prompt=tuple(prompts[i]),
            max_new_tokens=budgets[i],
            params=params[i],
            seed=seeds[i],
            request_id=ids[i * copies + copy],
            stop_ids=eos,
            stop_strings=tuple(kwargs.get("stop_strings", ())),
            min_new_tokens=kwargs.get("min_new_tokens", 0),
            biases=_biases(kwargs),
            processors=_processors(kwargs, eos, len(prompts[i]), len(prompts[i]) + budgets[i]),
            logprobs=_logprobs(kwargs, copies),
            source=None if sources is None else sources[i],
        )
        for i in range(len(prompts))
        for copy in range(copies)
    )
    if vocab_size is not None:
        _check_bans(requests[0], kwargs, vocab_size)
    pad = kwargs.get("pad_token_id", _first(model_config.pad_token_id, *ends, 0))
    return GenerateCall(
        requests, copies, pad, kwargs.get("max_time"), kwargs.get("streamer"), tokenizer, kwargs.get("seed") is not None
    )


def padding_id(keywords: Mapping[str, Any], model_config: GenerationConfig) -> int | None:
    """The id that can be nothing but padding; None where there is none, or where it ends texts, too."""
    kwargs = merged(keywords, model_config)
    pad = kwargs.get("pad_token_id", model_config.pad_token_id)
    return None if pad in _listed(kwargs.get("eos_token_id", model_config.eos_token_id)) else pad


def is_sampled(keywords: Mapping[str, Any]) -> bool:
    """Whether a call draws its tokens: a sampling parameter is given, and the temperature is not 0."""
    return any(name in keywords for name in SAMPLING) and keywords.get("temperature") != 0


def merged(keywords: Mapping[str, Any], model_config: GenerationConfig) -> dict[str, Any]:
    """Keywords over the fields of `generation_config`, each of the right type. Neutral values of refused ones drop out.

    A model's own configuration may have fields that no other has (Whisper's have many), and so may a copy of it. Of two
    limits in a configuration `max_new_tokens` counts, as in transformers; a keyword that would not count is refused.
    """
    kwargs = {}
    for name, value in {**_fields(keywords.get("generation_config"), model_config), **keywords}.items():
        if name in REFUSED:
            refuse_unless_neutral(name, value)
        elif name not in KNOWN:
            raise UnknownArgument(_suggestion(name))
        elif value is not None:
            kwargs[name] = CHECKS[name](name, value) if name in CHECKS else value
        elif name == "eos_token_id":  # of the call, as a configuration's None is left out: no end, not the model's
            kwargs[name] = []
    if kwargs.get("use_cache") is False:
        raise InvalidArgument("use_cache=False: speculation lives off the cache; leave it out")
    if keywords.get("max_length") is not None and "max_new_tokens" in kwargs:
        raise InvalidArgument(
            f"max_length={kwargs['max_length']} beside max_new_tokens={shown(kwargs['max_new_tokens'])}: "
            "both say where a row ends; leave out one"
        )
    if kwargs.get("do_sample") is False:
        _refuse_sampling(keywords)
    return kwargs


def _refuse_sampling(keywords: Mapping[str, Any]) -> None:
    """Of a call that is greedy by its own word, or by its configuration's, beside which neutral values may stand."""
    asked = [name for name in SAMPLING if keywords.get(name) is not None]
    whose = ""
    if keywords.get("do_sample") is None:
        asked, whose = [name for name in asked if keywords[name] not in NEUTRAL[name]], " of generation_config"
    if asked:
        remedy = "leave out one or the other" if not whose else "pass do_sample=True, too, or leave it out"
        raise InvalidArgument(f"do_sample=False{whose} with {', '.join(asked)}: {remedy}")


def _fields(config: Any, model_config: GenerationConfig) -> dict[str, Any]:
    """What a caller's configuration sets. All of it is honoured, refused by name, or known to be without effect."""
    if config is None:
        return {}
    if not isinstance(config, GenerationConfig):
        refuse("generation_config", config, "must be a transformers.GenerationConfig")
    default = vars(GenerationConfig())
    chosen = {name: value for name, value in vars(config).items() if not name.startswith("_") and value is not None}
    changed = {name: value for name, value in chosen.items() if not equal(value, default.get(name))}
    ignored = {
        name for name in changed if name in WITHOUT_EFFECT or (name not in default and name in vars(model_config))
    }
    if unknown := sorted(changed.keys() - KNOWN - REFUSED.keys() - ignored):
        name = unknown[0]
        refuse(f"generation_config.{name}", changed[name], f"no such setting is known; {_hint(name)}")
    return {name: value for name, value in changed.items() if name not in ignored}


def refuse_unless_neutral(name: str, value: Any, remedy: str | None = None) -> None:
    """A setting of `REFUSED` may be passed with a value that does nothing."""
    neutral, usual = REFUSED[name]
    if not any(value is n or equal(value, n) for n in neutral):
        raise InvalidArgument(f"{name}={shown(value)} is not offered: {remedy or usual}")


def _suggestion(name: str) -> str:
    return f"generate() got an unknown keyword {name!r}; {_hint(name)}"


ELSEWHERE = {"stop": "stop_strings", "n": "num_return_sequences", "max_tokens": "max_new_tokens"}
"""Keywords of OpenAI's interface and vLLM's, and what they are called here."""


def _hint(name: str) -> str:
    close = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, KNOWN, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(KNOWN))}"


def _check_vocabulary(kwargs: Mapping[str, Any], vocab_size: int) -> None:
    """Ids that are to be said or weighed must be the model's; ids that are to be avoided need not."""
    asked = {
        "logit_bias": kwargs.get("logit_bias", {}),
        "bad_words_ids": [token for word in kwargs.get("bad_words_ids", ()) for token in word],
        "sequence_bias": [token for word in kwargs.get("sequence_bias", ()) for token in word],
        "forced_bos_token_id": [kwargs[name] for name in ("forced_bos_token_id",) if name in kwargs],
        "forced_eos_token_id": kwargs.get("forced_eos_token_id", ()),
    }
    for name, ids in asked.items():
        if outside := [token for token in ids if isinstance(token, int) and token >= vocab_size]:
            raise InvalidArgument(f"{name}: the vocabulary ends at {vocab_size - 1}; remove {shown(outside[0])}")


def _check_bans(request: Request, kwargs: Mapping[str, Any], vocab_size: int) -> None:
    """Some token must be left to say."""
    names = [
        name for name in ("logit_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens") if name in kwargs
    ]
    banned = forbidden(request)
    if len(banned) >= vocab_size and len(banned & set(range(vocab_size))) == vocab_size:
        raise InvalidArgument(f"{' and '.join(names)}: all {vocab_size} tokens are forbidden; leave at least one")


def _seed(kwargs: Mapping[str, Any]) -> int | list[int]:
    seed: int | list[int] = kwargs["seed"] if "seed" in kwargs else secrets.randbits(63)
    return seed


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all rows, or a list with one a row."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidArgument(f"{name} has {len(value)} entries for {count} prompts; give one value, or one a prompt")
    return value


def _budgets(kwargs: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list[int]:
    if "max_new_tokens" in kwargs or "max_length" not in kwargs:
        return _spread(kwargs.get("max_new_tokens", LengthSettings().max_new_tokens), len(prompts), "max_new_tokens")
    budgets = [kwargs["max_length"] - len(prompt) for prompt in prompts]
    if min(budgets) < 1:
        longest = max(map(len, prompts))
        raise InvalidArgument(f"max_length={kwargs['max_length']} leaves no room after a prompt of {longest} tokens")
    return budgets


def _params(kwargs: Mapping[str, Any], count: int) -> list[SamplingParams]:
    do_sample = kwargs.get("do_sample", any(name in kwargs for name in SAMPLING))
    columns = {name: _spread(kwargs[name], count, name) for name in PER_ROW_PARAMS if name in kwargs}
    if not do_sample:
        columns = {name: values for name, values in columns.items() if name not in SAMPLING}
    columns.setdefault("temperature", [1.0 if do_sample else 0.0] * count)
    bias = kwargs.get("logit_bias", {})
    return [
        SamplingParams(**{name: values[i] for name, values in columns.items()}, logit_bias=bias) for i in range(count)
    ]


def _biases(kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What transformers adds to the logits before it penalises repetition."""
    bias = kwargs.get("sequence_bias")
    return (SequenceBiasLogitsProcessor(bias),) if bias else ()


def _processors(kwargs: Mapping[str, Any], eos: frozenset[int], begin: int, end: int) -> tuple[Any, ...]:
    """Bans and biases that transformers defines are built from its own classes; then the caller's.

    `begin` is the length of the prompt, `end` that of prompt and output together.
    """
    processors: list[LogitsProcessor] = []
    if size := kwargs.get("no_repeat_ngram_size"):
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if words := kwargs.get("bad_words_ids"):
        processors.append(NoBadWordsLogitsProcessor(words, sorted(eos) or None))
    if (first := kwargs.get("forced_bos_token_id")) is not None:
        processors.append(ForcedBOSTokenLogitsProcessor(first))
        begin += begin == 1  # what may not come first then comes second
    if (last := kwargs.get("forced_eos_token_id")) is not None:
        processors.append(ForcedEOSTokenLogitsProcessor(end, last))
    if banned := kwargs.get("suppress_tokens"):
        processors.append(SuppressTokensLogitsProcessor(banned))
    if banned := kwargs.get("begin_suppress_tokens"):
        processors.append(SuppressTokensAtBeginLogitsProcessor(banned, begin))
    return (*processors, *kwargs.get("logits_processor", ()))


def _logprobs(kwargs: Mapping[str, Any], copies: int) -> int | None:
    """Several sequences of one prompt are ranked by log-probability, so it is kept for them in any case."""
    asked = kwargs.get("logprobs")
    if asked is None or asked is False:
        return 0 if copies > 1 else None
    return 0 if asked is True else int(asked)


def id_set(value: int | Sequence[int] | None) -> frozenset[int]:
    """Of a setting that is an id, several or none, such as `eos_token_id`."""
    return frozenset(_listed(value))


def _listed(value: int | Sequence[int] | None) -> list[int]:
    """In the order given: transformers pads with the first end where no pad is known."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


# What each keyword may be.

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
        ids = one_or_several(name, value, check)
        return ids if isinstance(ids, list) else [ids]

    return checked


def _end_ids(name: str, value: Any) -> list[int]:
    ids: list[int] = _some_ids(_whole(0))(name, value)
    if not ids:
        refuse(name, value, "must be a token id or several; leave it out to force none")
    return ids


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [check_stop_string(name, value)]
    return list_of(name, value, check_stop_string, "must be a string or a list of strings")


def _words(name: str, value: Any) -> list[list[int]]:
    return list_of(name, value, _word, "must be a list of lists of token ids")


def _word(name: str, value: Any) -> list[int]:
    ids = list_of(name, value, _whole(0), "must be a list of token ids, each list one word")
    if not ids:
        refuse(name, value, "is an empty word; remove it")
    return ids


def _sequence_bias(name: str, value: Any) -> dict[tuple[int, ...], float]:
    """As a dictionary from tuples of ids, or as transformers writes it in JSON: a list of [ids, bias]."""
    remedy = "must be a dictionary from tuples of token ids to numbers, or a list of [ids, number]"
    pairs = value.items() if isinstance(value, Mapping) else entries(value)
    if pairs is None:
        refuse(name, value, remedy)
    biases = {}
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            refuse(name, value, remedy)
        biases[tuple(_word(f"{name}, a sequence", pair[0]))] = number(
            f"{name}[{shown(pair[0])}]", pair[1], lambda x: x == -math.inf or abs(x) <= FLOAT32_MAX,
            "must be a number of float32's range, or -inf to forbid the sequence",
        )  # fmt: skip
    return biases


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
# `forerun.inputs`.
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
