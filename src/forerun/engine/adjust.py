"""A row's own changes to the logits, position by position along the draft: bias, penalties, processors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forerun import ops
from forerun.arguments import shown
from forerun.config import Kernels, SamplingParams
from forerun.engine.bans import without_banned
from forerun.engine.processor_state import ProcessorState
from forerun.engine.request import LogitsProcessor, Request
from forerun.errors import InvalidArgument
from forerun.math.laws import most_likely
from forerun.math.precision import working
from forerun.math.transfer import int64, to_device
from forerun.types import Adjuster

# Which keyword of `generate` a processor of transformers comes from.
KEYWORDS = {
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
}


def adjuster(request: Request, output: Sequence[int], use: Kernels | None = None) -> Adjuster | None:
    """The row's adjuster, or None where the model's logits are used as they are. `output` is read when it is called."""
    has_penalties = request.params.has_penalties or (request.min_new_tokens and request.stop_ids)
    if not (has_penalties or request.biases or request.processors):
        return None
    steps = [_processor(bias) for bias in request.biases]
    if has_penalties:
        steps.append(_penalties(request.params, request, request.min_new_tokens, use))
    steps += [_processor(processor) for processor in request.processors]
    may_write = any(hasattr(processor, "along") for processor in (*request.biases, *request.processors))
    emitted = _Emitted(output)

    def apply(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        text = _Text(request.prompt, emitted, drafted[:first], drafted[first:], num_certain=0 if first else 1)
        adjusted = working(logits)
        if may_write and adjusted is logits:  # log-probabilities are told by the model's own
            adjusted = logits.clone()
        for step in steps:
            adjusted = step(adjusted, text)
        return adjusted

    return apply


class _Emitted:
    """A row's output, and how often each token is in it: counted on from where the last call had come to."""

    def __init__(self, output: Sequence[int]) -> None:
        self.output = output
        self._counts, self._num_counted = Counter[int](), 0

    @property
    def counts(self) -> Counter[int]:
        if len(self.output) < self._num_counted:
            self._counts, self._num_counted = Counter(), 0
        start, self._num_counted = self._num_counted, sys.maxsize  # whoever is interrupted now counts all of it again
        self._counts.update(self.output[start:])
        self._num_counted = len(self.output)
        return self._counts


@dataclass
class _Text:
    """What all steps of one call are about; lists as long as a prompt are made where a step asks for them."""

    prompt: Sequence[int]
    emitted: _Emitted
    before: Sequence[int]  # drafted tokens that come before the first position
    following: Sequence[int]  # those between the positions
    num_certain: int  # positions that are sure to be reached: others may lie behind a token that is not kept

    def __len__(self) -> int:
        """Tokens before the first position."""
        return len(self.prompt) + len(self.emitted.output) + len(self.before)

    @property
    def counts(self) -> Counter[int]:
        """How often each token comes between the prompt and the first position."""
        if not self.before:
            return self.emitted.counts
        counts = self.emitted.counts.copy()
        counts.update(self.before)
        return counts

    @cached_property
    def history(self) -> list[int]:
        return [*self.prompt, *self.emitted.output, *self.before]

    @cached_property
    def _ids(self) -> Tensor:
        return int64([*self.history, *self.following])

    def ids(self, position: int, device: torch.device) -> Tensor:
        """[1, n] all that comes before a position; the caller's own, to do with as it likes."""
        return to_device(self._ids[: len(self) + position].clone(), device)[None]


Step = Callable[[Tensor, _Text], Tensor]  # logits [n, V] -> logits [n, V]


class AfterPads:
    """A processor for one row of a padded batch that counts from the batch's left edge, as in transformers."""

    def __init__(self, processor: LogitsProcessor, pads: Sequence[int]) -> None:
        self.processor, self.pads = processor, list(pads)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        pads = input_ids.new_tensor([self.pads]).expand(len(input_ids), -1)
        return self.processor(torch.cat([pads, input_ids], dim=1), scores)


def cause_of_failure(request: Request, output: Sequence[int], drafted: Sequence[int], logits: Tensor) -> str | None:
    """Which of a request's options left nothing to choose, where the target's own `logits` [n, V] are sound.

    None where they are not. `drafted` are the tokens between the positions of `logits`, all of which have been reached:
    what a processor raises at one of them is raised.
    """
    if not _can_be_sampled(logits):
        return None
    text, names = _Text(request.prompt, _Emitted(output), (), drafted, num_certain=len(logits)), []
    logits = working(logits).clone()
    for name, step in _single_steps(request):
        names.append(name)
        logits = step(logits, text)
        if not _can_be_sampled(logits):
            break
    else:
        if names:  # one that failed when a draft led there, and does not fail now
            return f"one of {', '.join(names)}, asked a second time after an error,"
    others = f" (applied after {', '.join(names[:-1])})" if names[1:] else ""
    return f"{names[-1]}{others}" if names else "an option of the sampler"


def _single_steps(request: Request) -> list[tuple[str, Step]]:
    """What the adjuster does, option by option."""
    params, plain = request.params, SamplingParams()
    changed = [name for name in OPTIONS if getattr(params, name) != getattr(plain, name)]
    steps = [(_name(bias), _processor(bias)) for bias in request.biases]
    steps += [
        (f"{name}={shown(getattr(params, name))}", _penalties(replace(plain, **{name: getattr(params, name)}), request))
        for name in changed
    ]
    if request.min_new_tokens:
        minimum = request.min_new_tokens
        steps.append((f"min_new_tokens={minimum}", _penalties(plain, request, minimum)))
    return steps + [(_name(processor), _processor(processor)) for processor in request.processors]


OPTIONS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")  # in the order they are applied


def _name(processor: LogitsProcessor) -> str:
    kind = _kind(processor)
    return KEYWORDS.get(kind, f"logits_processor {kind}")


def _can_be_sampled(logits: Tensor) -> bool:
    """Whether every position has a token to choose, and none is infinitely likely or not a number."""
    best = most_likely(logits).unsqueeze(-1)  # NaN where any logit is
    return bool(logits.gather(-1, best).isfinite().all())


def _penalties(params: SamplingParams, request: Request, min_new_tokens: int = 0, use: Kernels | None = None) -> Step:
    forbid = sorted(request.stop_ids) if min_new_tokens else []
    # Of a prompt only a repetition penalty asks anything: which tokens are in it. It may be long, and rounds are many.
    prompt = tuple(dict.fromkeys(request.prompt)) if params.repetition_penalty != 1 else ()

    def step(logits: Tensor, text: _Text) -> Tensor:
        return ops.adjust(
            logits, prompt, text.counts, text.following, params, forbid=forbid, min_new_tokens=min_new_tokens, use=use
        )

    return step


def _processor(processor: LogitsProcessor) -> Step:
    return lambda logits, text: _processed(processor, text, logits)


def _processed(processor: LogitsProcessor, text: _Text, logits: Tensor) -> Tensor:
    """One processor at all positions: at once where it offers that or only forbids ids, else one by one.

    A draft leads to texts that plain decoding never asks about: behind a token that this processor has just forbidden,
    or behind the end. What is raised there says nothing yet. Such a position and those behind it have no law; a row
    that does come to one fails, and what was raised is raised then (`cause_of_failure`).
    """
    if (along := getattr(processor, "along", None)) is not None:
        adjusted: Tensor = along(text.history, text.following, logits)
        return adjusted
    if (left := without_banned(processor, len(text), logits)) is not None:
        return left
    rows = []
    for position, row in enumerate(logits):
        scores = _called(processor, text.ids(position, row.device), row[None], position < text.num_certain)
        if scores is None:
            rows.append(torch.full_like(logits[position:], torch.nan))
            break
        rows.append(scores)
    return torch.cat(rows)


def _called(processor: LogitsProcessor, ids: Tensor, scores: Tensor, is_certain: bool) -> Tensor | None:
    """A processor sees the row's own unpadded history, as it would in plain decoding at batch 1.

    None where it raises, unless `is_certain`.
    """
    before, has_raised = ProcessorState.of(_unwrapped(processor)), False
    adjusted: Any = None
    try:
        adjusted = processor(ids, scores.clone())
    except (MemoryError, torch.OutOfMemoryError):  # nothing that the text has to do with
        raise
    except Exception:
        if is_certain:
            raise
        has_raised = True
    if before.differs(ProcessorState.of(_unwrapped(processor))):
        raise InvalidArgument(
            f"logits_processor {_kind(processor)} changes its own state when called; a draft asks for positions that "
            "may be taken back, so only processors that depend on their arguments alone can be used"
        )
    if has_raised:
        return None
    if not _are_scores(adjusted, scores):
        raise InvalidArgument(
            f"logits_processor {_kind(processor)} returned {shown(adjusted)}; it must return scores of shape "
            f"{tuple(scores.shape)}, as it was given them"
        )
    new_scores: Tensor = adjusted.to(scores)
    return new_scores


def _unwrapped(processor: LogitsProcessor) -> LogitsProcessor:
    """The caller's, whatever it is wrapped in."""
    return processor.processor if isinstance(processor, AfterPads) else processor


def _kind(processor: LogitsProcessor) -> str:
    """The name of its class; of a function or a method its own."""
    unwrapped = _unwrapped(processor)
    name: str = getattr(unwrapped, "__qualname__", type(unwrapped).__name__)
    return name


def _are_scores(value: Any, like: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.shape == like.shape and value.is_floating_point() and value.device == like.device
