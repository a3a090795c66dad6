"""What is asked of the engine for one sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.types import Source

# As in transformers: (token ids so far [1, n], scores [1, V]) -> scores [1, V]. One that also has a method
# `along(history, drafted, logits [n, V]) -> [n, V]` is asked for all positions of a draft at once: the first of them
# follows `history`, each later one a token of `drafted` more; it may change the logits in place.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_new_tokens, or the model's context
    TIME = "time"  # max_time
    ABORT = "abort"
    ERROR = "error"  # the target returned NaN or infinity for this row


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
    min_new_tokens: int = 0
    """No stop id before so many tokens."""
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    """None for none; n for each token's log-probability under the model itself and the n most likely alternatives."""
    source: Source | None = None
    """What the encoder of an encoder-decoder target reads; the prompt is then how the decoder's text begins."""
    deadline: float | None = None
    """By the engine's clock: what is not finished then ends with what it has."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidArgument("the prompt is empty: give at least one token (a begin-of-sequence id will do)")
        if self.max_new_tokens < 1:
            raise InvalidArgument(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidArgument(f"logprobs={self.logprobs}: must be >= 0, or None for no log-probabilities")
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidArgument(f"seed={self.seed}: must fit 64 bits, sign included")
        if not 0 <= self.request_id < 2**32:
            raise InvalidArgument(f"request_id={self.request_id}: must fit 32 bits")
        if any(not text for text in self.stop_strings):
            raise InvalidArgument("stop_strings holds an empty string, which would stop everything: remove it")
