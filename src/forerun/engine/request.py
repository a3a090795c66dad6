"""What is asked of the engine for one sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from torch import Tensor

from forerun.arguments import flag, integer, list_of, number, refuse
from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.types import Source

# As in transformers: (token ids so far [1, n], scores [1, V]) -> scores [1, V]. One that also has a method
# `along(history, drafted, logits [n, V]) -> [n, V]` is asked for all positions of a draft at once: the first of them
# follows `history`, each later one a token of `drafted` more; it may change the logits in place.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

MOST_NEW_TOKENS = 2**31 - 1  # more than any memory holds


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_new_tokens, or the model's context
    TIME = "time"  # max_time
    ABORT = "abort"
    ERROR = "error"  # the target returned NaN or infinity for this row, or its encoder cannot read the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and everything that shapes its continuation."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    request_id: int = 0
    """Keys the random numbers: two rows with the same seed need different ids. 32 bits."""
    stop_ids: frozenset[int] = frozenset()
    """Ends the row; the id itself is part of the output."""
    stop_strings: tuple[str, ...] = ()
    """Ends the row with the token that completes one of them."""
    stops_in_prompt: bool = True
    """Whether a stop string may begin in the prompt, as in transformers; False looks at the output alone."""
    min_new_tokens: int = 0
    """No stop id before so many tokens."""
    stops_early: bool = True
    """Whether a stop string may end the row within `min_new_tokens`, as in transformers; False: a later one."""
    biases: tuple[LogitsProcessor, ...] = ()
    """Processors that come before the penalties, as `sequence_bias` does in transformers."""
    processors: tuple[LogitsProcessor, ...] = ()
    """Processors that come after them."""
    logprobs: int | None = None
    """None for none; n for each token's log-probability under the model itself and the n most likely alternatives."""
    source: Source | None = None
    """What the encoder of an encoder-decoder target reads; the prompt is then how the decoder's text begins."""
    max_draft_tokens: int | None = None
    """Tokens drafted for this row in one round, at most; 0 decodes it plainly, None leaves it to the policy."""
    prediction: tuple[int, ...] = ()
    """What the output is expected to be; drafted from as long as it comes true, by a drafter that takes predictions."""
    deadline: float | None = None
    """By the engine's clock: what is not finished then ends with what it has."""

    def __post_init__(self) -> None:
        """Refuse what cannot be decoded; numbers of numpy and torch become Python's."""
        if not isinstance(self.params, SamplingParams):
            refuse("params", self.params, "must be SamplingParams(...)")
        if self.source is not None and not isinstance(self.source, Source):
            refuse("source", self.source, "must be Source(...)")
        checked: dict[str, Any] = {
            "prompt": _prompt(self.prompt),
            "max_new_tokens": integer("max_new_tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS),
            "min_new_tokens": integer("min_new_tokens", self.min_new_tokens, 0, MOST_NEW_TOKENS),
            "seed": integer("seed", self.seed),
            "request_id": integer("request_id", self.request_id, 0, 2**32 - 1, "must fit 32 bits"),
            "prediction": _prediction(self.prediction),
            "stop_ids": _stop_ids(self.stop_ids),
            "stops_in_prompt": flag("stops_in_prompt", self.stops_in_prompt),
            "stops_early": flag("stops_early", self.stops_early),
            "stop_strings": tuple(list_of("stop_strings", self.stop_strings, check_stop_string, "must be strings")),
            "biases": tuple(list_of("biases", self.biases, check_processor, "must be processors")),
            "processors": tuple(list_of("processors", self.processors, check_processor, "must be processors")),
        }
        if self.logprobs is not None:
            rule = "must be >= 0, or None for no log-probabilities"
            checked["logprobs"] = integer("logprobs", self.logprobs, 0, remedy=rule)
        if self.max_draft_tokens is not None:
            rule = "must be >= 0, or None to leave it to the policy"
            checked["max_draft_tokens"] = integer("max_draft_tokens", self.max_draft_tokens, 0, remedy=rule)
        if self.deadline is not None:
            checked["deadline"] = number("deadline", self.deadline)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def check_processor(name: str, value: Any) -> LogitsProcessor:
    """Something that can be called with token ids and scores."""
    if isinstance(value, type):
        refuse(name, value, f"is a class; give an object of it, {value.__name__}(...)")
    if not callable(value):
        refuse(name, value, "must be a logits processor, called with (input_ids, scores)")
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        refuse(name, value, "must be callable with two arguments, (input_ids, scores)")
    except ValueError:  # of what is written in C nothing is known
        pass
    processor: LogitsProcessor = value
    return processor


def check_stop_string(name: str, value: Any) -> str:
    """A text that can be looked for."""
    if not isinstance(value, str):
        refuse(name, value, "must be a string")
    if not value:
        raise InvalidArgument("stop_strings holds an empty string, which would stop everything: remove it")
    return value


def check_fits(prompt: Sequence[int], context_length: int | None) -> None:
    """Raise where a prompt leaves no room for a new token in the target's context."""
    if context_length is not None and len(prompt) >= context_length:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens, the target's context ends at {context_length}: shorten the prompt"
        )


def _prompt(value: Any) -> tuple[int, ...]:
    if type(value) is tuple and value and set(map(type, value)) == {int}:
        return value  # as nearly all are: requests are made often, and prompts are long
    tokens = list_of("prompt", value, integer, "must be token ids")
    if not tokens:
        raise InvalidArgument("the prompt is empty: give at least one token (a begin-of-sequence id will do)")
    return tuple(tokens)


def _prediction(value: Any) -> tuple[int, ...]:
    if type(value) is tuple and set(map(type, value)) <= {int} and min(value, default=0) >= 0:
        return value  # a file may be predicted
    return tuple(list_of("prediction", value, partial(integer, low=0), "must be token ids"))


def _stop_ids(value: Any) -> frozenset[int]:
    ids = sorted(value) if isinstance(value, frozenset | set) else value
    return frozenset(list_of("stop_ids", ids, integer, "must be token ids"))
