"""Reading what `model.generate` has prepared when it calls us as its `custom_generate`.

transformers merges processors of its configuration and of its caller into one list, in which a processor of the caller
takes the place of its own of the same class. So the class says nothing; what would be made from the configuration is
made once more and compared.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitNormalization,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.arguments import equal
from forerun.engine.adjust import AfterPads
from forerun.engine.request import Request
from forerun.errors import InvalidArgument
from forerun.inputs import FROM_MODEL
from forerun.keywords import KNOWN, REFUSED, SAMPLING

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Made from fields that are refused, or of an encoder's input: never compared.
NEVER_COMPARED = (
    "guidance_scale", "watermarking_config", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# Fields of which transformers makes processors that come before temperature and truncation.
PROCESSORS = frozenset({
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "min_length",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
})  # fmt: skip
# What transformers prepares for its own loop and ours does not need.
LOOP_STATE = frozenset({
    "attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep", "cache_position",
    "decoder_position_ids",
})  # fmt: skip
# Of an encoder-decoder model, whose encoder has run by then.
DECODER_STATE = frozenset({"encoder_outputs", "decoder_attention_mask"})


@dataclass(frozen=True, slots=True)
class SurroundingCall:
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
) -> SurroundingCall:
    """Honour or refuse all that transformers hands over, whether it comes from a configuration or from the caller."""
    refuse_unknown_state(model_kwargs)
    refuse_by_row(processors, len(ids))
    if config is None or (config.eos_token_id is None and not surrounding_call(model)):  # called by hand
        config = copy.copy(config) or GenerationConfig()
        config.eos_token_id = getattr(model.generation_config, "eos_token_id", None)
    limits = limits_of(criteria)
    changing = [p for p in processors if type(p) is not LogitNormalization]  # which leaves the law as it is
    split = Processors.of(changing, config, model, ids.shape[1])
    if split.in_order and _keeps(config, limits):
        keywords, unexplained = _keywords(config, limits, ids.shape[1]), split.unexplained
    else:  # one of the caller's has taken the place of transformers' own: all of them are applied as they stand
        keywords, unexplained = _keywords(config, limits, ids.shape[1], leave_out=PROCESSORS), split.before
    side = "decoder_" if "encoder_outputs" in model_kwargs else ""
    mask, positions = model_kwargs.get(f"{side}attention_mask"), model_kwargs.get(f"{side}position_ids")
    refuse_other_positions(ids, mask, positions, f"{side}position_ids")
    return SurroundingCall(keywords, unexplained, ids, mask)


def _keeps(config: GenerationConfig, limits: Mapping[str, Any]) -> bool:
    """Whether rows end where the configuration says: processors made of it look at that."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    same_ends = set(limits.get("eos_token_id", ends)) == set(ends)
    return same_ends and limits.get("max_length", config.max_length) == config.max_length


def refuse_unknown_state(model_kwargs: Mapping[str, Any]) -> None:
    """Of what transformers hands to its loop, whatever is neither read here nor unneeded.

    The cache that it makes itself is empty. One that holds a text is the caller's, and the prompt then may lack it.
    """
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (held := int(cache.get_seq_length())):
        raise InvalidArgument(
            f"past_key_values with {held} tokens cannot be honoured: Forerun keeps its own ragged cache; give the "
            "whole text as input_ids (keep_rows=n at the decoder keeps the keys of earlier texts)"
        )
    known = LOOP_STATE | (DECODER_STATE if "encoder_outputs" in model_kwargs else frozenset())
    unknown = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)} cannot be honoured by speculative decoding here; leave it out")


def refuse_other_positions(ids: Tensor, mask: Tensor | None, positions: Tensor | None, name: str) -> None:
    """transformers counts what the mask [B, n] shows; tokens are put nowhere else here. Those of pads mean nothing."""
    if positions is None:
        return
    seen = torch.ones_like(ids) if mask is None else mask.to(ids.device).long()
    counted = seen.cumsum(-1) - 1
    if positions.shape[-1] != ids.shape[1] or ((positions.to(ids.device) != counted) & (seen != 0)).any():
        raise InvalidArgument(f"{name} other than the mask's own cannot be honoured: leave it out, tokens are counted")


def _keywords(
    config: GenerationConfig, limits: Mapping[str, Any], width: int, leave_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """`width` is the length of the padded prompts, from which transformers counts `max_length`."""
    fields = {**{name: value for name, value in config.to_dict().items() if value is not None}, **limits}
    keywords = {name: value for name, value in fields.items() if name in KNOWN or name in REFUSED}
    keywords.setdefault("eos_token_id", [])  # which ends no row; the model's own end is in `config` if it is to count
    keywords.pop("num_return_sequences", None)  # the rows that arrive here are copies already
    if keywords.get("min_new_tokens"):
        keywords.pop("min_length", None)  # derived from it
    if "max_length" in keywords:
        keywords["max_new_tokens"] = max(1, keywords.pop("max_length") - width)  # it is looked at after a token
    if not keywords.get("do_sample"):
        leave_out = leave_out.union(SAMPLING)
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
    split = {name: model_kwargs.get(name) for name in DECODER_STATE}
    unasked = dict.fromkeys(name for name in FROM_MODEL if name not in keywords)
    return {"decoder_input_ids": ids, **split, **unasked}


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one call, in the order in which transformers would apply them."""

    before: tuple[Any, ...]  # all that come before temperature and truncation
    warpers: tuple[Any, ...]  # temperature and truncation as the configuration has them
    unexplained: tuple[Any, ...]  # of `before`, those that the configuration does not explain
    in_order: bool  # whether `unexplained` come behind all that it explains, and stand in for none of them

    @classmethod
    def of(cls, processors: Sequence[Any], config: GenerationConfig, model: PreTrainedModel, width: int) -> Processors:
        """`width` is the length of the padded prompts."""
        wanted = _from_config(config, model, width)
        before, warpers = _split(processors, [p for p in wanted if type(p) in WARPERS])
        expected = [p for p in wanted if type(p) not in WARPERS]
        kinds, explained = {type(p) for p in expected}, []
        for processor in before:
            twin = next((p for p in expected if _same(p, processor)), None)
            expected = [p for p in expected if p is not twin]
            explained.append(twin is not None)
        unexplained = tuple(p for p, known in zip(before, explained, strict=True) if not known)
        in_order = explained == sorted(explained, reverse=True) and not any(type(p) in kinds for p in unexplained)
        return cls(before, warpers, unexplained, in_order)


def _split(processors: Sequence[Any], warpers: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What comes before `warpers`, and they; who calls by hand may have left them to the configuration."""
    cut = len(processors) - len(warpers)
    if cut >= 0 and all(map(_same, processors[cut:], warpers)):
        return tuple(processors[:cut]), tuple(processors[cut:])
    if any(_same(one, other) for one in processors for other in warpers):
        raise InvalidArgument(
            f"{type(processors[-1]).__name__} comes after the temperature, where drafts cannot follow it; leave it out"
        )
    return tuple(processors), ()


def refuse_by_row(processors: Sequence[Any], rows: int) -> None:
    """Each row is decoded by itself, so a function that is told a row's place in the batch would hear 0."""
    if rows > 1 and any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors):
        raise InvalidArgument(
            f"prefix_allowed_tokens_fn with {rows} sequences: drafts cannot tell it which of them is asked about; "
            "decode one at a time, or pass a logits_processor"
        )


def limits_of(criteria: Sequence[Any]) -> dict[str, Any]:
    """Keywords that mean what the criteria mean, whoever gave them."""
    limits: dict[str, Any] = {}
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            limits["max_length"] = min(criterion.max_length, limits.get("max_length", criterion.max_length))
        elif kind is EosTokenCriteria:
            ends = [*limits.get("eos_token_id", ()), *_ids(criterion.eos_token_id)]
            limits["eos_token_id"] = list(dict.fromkeys(ends))  # in order: the first may be the pad
        elif kind is MaxTimeCriteria:
            left = max(0.0, criterion.initial_timestamp + criterion.max_time - time.time())
            limits["max_time"] = min(left, limits.get("max_time", left))
        elif kind is StopStringCriteria:
            limits["stop_strings"] = [*limits.get("stop_strings", ()), *criterion.stop_strings]
        else:
            raise InvalidArgument(
                f"the stopping criterion {getattr(criterion, '__name__', kind.__name__)} cannot be honoured by "
                "speculative decoding here: use stop_strings, eos_token_id, max_new_tokens or max_time"
            )
    return limits


def surrounding_call(model: PreTrainedModel) -> Mapping[str, Any]:
    """Arguments of the `model.generate` that is calling, for what it keeps from a `custom_generate`.

    Of an `assistant_model` it says nothing. Into a streamer it puts the prompt, and says nothing of it either: whoever
    listens would wait for ever. Empty where nobody has called `generate`.
    """
    return next((call for call in _calls() if call.get("self") is model), {})


def _calls() -> Iterator[Mapping[str, Any]]:
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_code is _GENERATE:
            yield caller.f_locals
        frame = caller


def _from_config(config: GenerationConfig, model: PreTrainedModel, width: int) -> list[Any]:
    """What transformers makes of the configuration alone."""
    plain = copy.copy(config)
    for name in NEVER_COMPARED:
        setattr(plain, name, None)
    if not hasattr(plain, "_eos_token_tensor"):  # one that `generate` has not prepared
        ends = plain.eos_token_id
        plain._eos_token_tensor = None if ends is None else torch.tensor([ends] if isinstance(ends, int) else ends)
    return list(model._get_logits_processor(plain, input_ids_seq_length=width, device="cpu"))


def _same(one: Any, other: Any) -> bool:
    """Whether two processors do the same, as far as their class and what they hold can say."""
    if type(one) is not type(other):
        return False
    left, right = vars(one), vars(other)
    return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)


def _ids(value: Tensor) -> list[int]:
    return [int(token) for token in value.flatten().tolist()]


def after_pads(processors: Sequence[Any], ids: Tensor, mask: Tensor | None, row: int) -> tuple[Any, ...]:
    """The processors of one row of a batch [B, n]."""
    pads = [] if mask is None else ids[row][~mask[row].bool()].tolist()
    return tuple(AfterPads(p, pads) for p in processors) if pads else tuple(processors)
