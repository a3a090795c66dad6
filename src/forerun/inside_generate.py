"""Reading what `model.generate` has prepared when it calls us as its `custom_generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitNormalization, PreTrainedModel

from forerun.engine.request import Request
from forerun.errors import InvalidArgument
from forerun.keywords import KNOWN, REFUSED
from forerun.prepared import Processors, after_pads, limits_of, refuse_by_row, surrounding_call
from forerun.sources import FROM_MODEL

# Fields of which transformers makes processors that come before temperature and truncation.
PROCESSORS = frozenset({
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "min_length",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
})  # fmt: skip
# What transformers prepares for its own loop and ours does not need.
OWN_STATE = frozenset({
    "attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep", "cache_position",
    "decoder_position_ids",
})  # fmt: skip
# Of an encoder-decoder model, whose encoder has run by then.
DECODER_STATE = frozenset({"encoder_outputs", "decoder_attention_mask"})
SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p"})


@dataclass(frozen=True, slots=True)
class Inside:
    """What the surrounding `model.generate` means, in our words."""

    keywords: Any  # of `SpeculativeDecoder.generate`
    processors: tuple[Any, ...]  # to be applied as they are, after what the keywords ask for
    ids: Tensor  # [B, n] padded prompts, or what a decoder begins with
    mask: Tensor | None  # [B, n]

    def for_row(self, request: Request, row: int) -> Request:
        """The request of one row, with what the caller's processors do to it."""
        return replace(request, processors=request.processors + after_pads(self.processors, self.ids, self.mask, row))


def read_call(
    model: PreTrainedModel,
    ids: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: GenerationConfig | None,
    model_kwargs: Mapping[str, Any],
) -> Inside:
    """Honour or refuse all that transformers hands over, whether it comes from a configuration or from the caller."""
    _refuse_strange(model_kwargs)
    refuse_by_row(processors, len(ids))
    config = GenerationConfig() if config is None else config
    limits = limits_of(criteria)
    changing = [p for p in processors if type(p) is not LogitNormalization]  # which leaves the law as it is
    given = Processors.of(changing, config, model, ids.shape[1])
    if given.in_order and _keeps(config, limits):
        keywords, own = _keywords(config, limits, ids.shape[1]), given.own
    else:  # one of the caller's has taken the place of transformers' own: all of them are applied as they stand
        keywords, own = _keywords(config, limits, ids.shape[1], leave_out=PROCESSORS), given.before
    mask = model_kwargs.get("decoder_attention_mask" if "encoder_outputs" in model_kwargs else "attention_mask")
    return Inside(keywords, own, ids, mask)


def _keeps(config: GenerationConfig, limits: Mapping[str, Any]) -> bool:
    """Whether rows end where the configuration says: processors made of it look at that."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    same_ends = set(limits.get("eos_token_id", ends)) == set(ends)
    return same_ends and limits.get("max_length", config.max_length) == config.max_length


def _refuse_strange(model_kwargs: Mapping[str, Any]) -> None:
    known = OWN_STATE | (DECODER_STATE if "encoder_outputs" in model_kwargs else frozenset())
    strange = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    if strange:
        raise InvalidArgument(f"{', '.join(strange)} cannot be honoured by speculative decoding here; leave it out")


def _keywords(
    config: GenerationConfig, limits: Mapping[str, Any], width: int, leave_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """`width` is the length of the padded prompts, from which transformers counts `max_length`."""
    fields = {**{name: value for name, value in config.to_dict().items() if value is not None}, **limits}
    keywords = {name: value for name, value in fields.items() if name in KNOWN or name in REFUSED}
    keywords.pop("num_return_sequences", None)  # the rows that arrive here are copies already
    if keywords.get("min_new_tokens"):
        keywords.pop("min_length", None)  # derived from it
    if "max_length" in keywords:
        keywords["max_new_tokens"] = max(1, keywords.pop("max_length") - width)  # it is looked at after a token
    if not keywords.get("do_sample"):
        leave_out |= SAMPLING
    return {name: value for name, value in keywords.items() if name not in leave_out}


@contextmanager
def listening(model: PreTrainedModel) -> Iterator[Any]:
    """The streamer that the surrounding `model.generate` was given, which has heard the prompt by now.

    If the call is refused it hears the end as well: who listens in another thread would wait for it.
    """
    outside = surrounding_call(model)
    streamer = outside.get("streamer")
    try:
        if outside.get("assistant_model") is not None:
            raise InvalidArgument(
                "assistant_model beside custom_generate: the decoder drafts by itself; leave it out, or give it to "
                "SpeculativeDecoder as DraftModel(...)"
            )
        yield streamer
    except BaseException:
        if streamer is not None:
            with suppress(Exception):
                streamer.end()
        raise


def decoder_inputs(ids: Tensor, model_kwargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What an encoder-decoder model's rows begin with. What its configuration does not ask for now, it does not get:
    Whisper clears fields that it has made processors of."""
    given = {name: model_kwargs.get(name) for name in DECODER_STATE}
    unasked = dict.fromkeys(name for name in FROM_MODEL if name not in keywords)
    return {"decoder_input_ids": ids, **given, **unasked}
