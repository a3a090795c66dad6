"""What `model.generate` has prepared for its loop, told apart: made from its configuration, or given by its caller.

transformers merges both into one list, in which a processor of the caller takes the place of its own of the same class.
So the class says nothing; what would be made from the configuration is made once more and compared.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
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

from forerun.engine.adjust import AfterPads
from forerun.errors import InvalidArgument

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Made from fields that are refused, or of an encoder's input: never compared.
UNMADE = (
    "guidance_scale", "watermarking_config", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one call, in the order in which transformers would apply them."""

    before: tuple[Any, ...]  # all that come before temperature and truncation
    warpers: tuple[Any, ...]  # temperature and truncation as the configuration has them
    own: tuple[Any, ...]  # of `before`, those that the configuration does not explain
    in_order: bool  # whether `own` come behind all that it explains, and stand in for none of them

    @classmethod
    def of(cls, processors: Sequence[Any], config: GenerationConfig, model: PreTrainedModel, width: int) -> Processors:
        """`width` is the length of the padded prompts."""
        wanted = _made(config, model, width)
        before, warpers = _split(processors, [p for p in wanted if type(p) in WARPERS])
        made = [p for p in wanted if type(p) not in WARPERS]
        kinds, explained = {type(p) for p in made}, []
        for processor in before:
            twin = next((p for p in made if _same(p, processor)), None)
            made = [p for p in made if p is not twin]
            explained.append(twin is not None)
        own = tuple(p for p, known in zip(before, explained, strict=True) if not known)
        in_order = explained == sorted(explained, reverse=True) and not any(type(p) in kinds for p in own)
        return cls(before, warpers, own, in_order)


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
    found: dict[str, Any] = {}
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            found["max_length"] = min(criterion.max_length, found.get("max_length", criterion.max_length))
        elif kind is EosTokenCriteria:
            found["eos_token_id"] = sorted({*found.get("eos_token_id", ()), *_ids(criterion.eos_token_id)})
        elif kind is MaxTimeCriteria:
            left = max(0.0, criterion.initial_timestamp + criterion.max_time - time.time())
            found["max_time"] = min(left, found.get("max_time", left))
        elif kind is StopStringCriteria:
            found["stop_strings"] = [*found.get("stop_strings", ()), *criterion.stop_strings]
        else:
            raise InvalidArgument(
                f"the stopping criterion {getattr(criterion, '__name__', kind.__name__)} cannot be honoured by "
                "speculative decoding here: use stop_strings, eos_token_id, max_new_tokens or max_time"
            )
    return found


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


def _made(config: GenerationConfig, model: PreTrainedModel, width: int) -> list[Any]:
    """What transformers makes of the configuration alone."""
    plain = copy.copy(config)
    for name in UNMADE:
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
    return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    return bool(one == other)


def _ids(value: Tensor) -> list[int]:
    return [int(token) for token in value.flatten().tolist()]


def after_pads(processors: Sequence[Any], ids: Tensor, mask: Tensor | None, row: int) -> tuple[Any, ...]:
    """The processors of one row of a batch [B, n]."""
    pads = [] if mask is None else ids[row][~mask[row].bool()].tolist()
    return tuple(AfterPads(p, pads) for p in processors) if pads else tuple(processors)
