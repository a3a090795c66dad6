"""A row's own changes to the logits, position by position along the draft: bias, penalties, processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from forerun.math.precision import working
from forerun.types import Adjuster

# (logits [n, V], tokens before the first position, tokens between the positions) -> logits [n, V]
Step = Callable[[Tensor, list[int], Sequence[int]], Tensor]

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
    params = request.params
    if not (params.has_penalties or request.min_new_tokens or request.biases or request.processors):
        return None
    steps = [
        *(_processor(bias, request) for bias in request.biases),
        _penalties(params, request, request.min_new_tokens, use),
        *(_processor(processor, request) for processor in request.processors),
    ]

    def apply(logits: Tensor, drafted: Sequence[int], first: int) -> Tensor:
        before = [*output, *drafted[:first]]
        logits = working(logits)
        for step in steps:
            logits = step(logits, before, drafted[first:])
        return logits

    return apply


class AfterPads:
    """A processor for one row of a padded batch that counts from the batch's left edge, as in transformers."""

    def __init__(self, processor: LogitsProcessor, pads: Sequence[int]) -> None:
        self.processor, self.pads = processor, list(pads)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        pads = input_ids.new_tensor([self.pads]).expand(len(input_ids), -1)
        return self.processor(torch.cat([pads, input_ids], dim=1), scores)


def cause_of_failure(request: Request, output: Sequence[int], drafted: Sequence[int], logits: Tensor) -> str | None:
    """Which of a request's options left nothing to choose, where the target's own `logits` [n, V] are sound.

    None where they are not. `drafted` are the tokens between the positions of `logits`.
    """
    if not _can_be_sampled(logits):
        return None
    before, names = list(output), []
    logits = working(logits)
    for name, step in _single_steps(request):
        names.append(name)
        logits = step(logits, before, drafted)
        if not _can_be_sampled(logits):
            break
    others = f" (applied after {', '.join(names[:-1])})" if names[1:] else ""
    return f"{names[-1]}{others}" if names else "an option of the sampler"


def _single_steps(request: Request) -> list[tuple[str, Step]]:
    """What the adjuster does, option by option."""
    params, plain = request.params, SamplingParams()
    changed = [name for name in OPTIONS if getattr(params, name) != getattr(plain, name)]
    steps = [(_name(bias), _processor(bias, request)) for bias in request.biases]
    steps += [
        (f"{name}={shown(getattr(params, name))}", _penalties(replace(plain, **{name: getattr(params, name)}), request))
        for name in changed
    ]
    if request.min_new_tokens:
        minimum = request.min_new_tokens
        steps.append((f"min_new_tokens={minimum}", _penalties(plain, request, minimum)))
    return steps + [(_name(processor), _processor(processor, request)) for processor in request.processors]


OPTIONS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")  # in the order they are applied


def _name(processor: LogitsProcessor) -> str:
    kind = _kind(processor)
    return KEYWORDS.get(kind, f"logits_processor {kind}")


def _can_be_sampled(logits: Tensor) -> bool:
    """Whether every position has a token to choose, and none is infinitely likely or not a number."""
    best = logits.amax(dim=-1)  # NaN where any logit is
    return bool(best.isfinite().all())


def _penalties(params: SamplingParams, request: Request, min_new_tokens: int = 0, use: Kernels | None = None) -> Step:
    forbid = sorted(request.stop_ids) if min_new_tokens else []
    # Of a prompt only a repetition penalty asks anything: which tokens are in it. It may be long, and rounds are many.
    prompt = tuple(dict.fromkeys(request.prompt)) if params.repetition_penalty != 1 else ()

    def step(logits: Tensor, before: list[int], following: Sequence[int]) -> Tensor:
        return ops.adjust(
            logits, prompt, before, following, params, forbid=forbid, min_new_tokens=min_new_tokens, use=use
        )

    return step


def _processor(processor: LogitsProcessor, request: Request) -> Step:
    def step(logits: Tensor, before: list[int], following: Sequence[int]) -> Tensor:
        return _processed(processor, [*request.prompt, *before], following, logits)

    return step


def _processed(processor: LogitsProcessor, history: list[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
    """One processor at all positions: at once where it offers that or only forbids ids, else one by one."""
    if (along := getattr(processor, "along", None)) is not None:
        adjusted: Tensor = along(history, drafted, logits)
        return adjusted
    if (left := without_banned(processor, len(history), logits)) is not None:
        return left
    return torch.cat([_called(processor, [*history, *drafted[:i]], row[None]) for i, row in enumerate(logits)])


def _called(processor: LogitsProcessor, history: list[int], scores: Tensor) -> Tensor:
    """A processor sees the row's own unpadded history, as it would in plain decoding at batch 1."""
    before = ProcessorState.of(_own(processor))
    adjusted = processor(torch.tensor([history], device=scores.device), scores.clone())
    if before.differs(ProcessorState.of(_own(processor))):
        raise InvalidArgument(
            f"logits_processor {_kind(processor)} changes its own state when called; a draft asks for positions that "
            "may be taken back, so only processors that depend on their arguments alone can be used"
        )
    if not _are_scores(adjusted, scores):
        raise InvalidArgument(
            f"logits_processor {_kind(processor)} returned {shown(adjusted)}; it must return scores of shape "
            f"{tuple(scores.shape)}, as it was given them"
        )
    return adjusted.to(scores)


def _own(processor: LogitsProcessor) -> LogitsProcessor:
    """The caller's, whatever it is wrapped in."""
    return processor.processor if isinstance(processor, AfterPads) else processor


def _kind(processor: LogitsProcessor) -> str:
    """The name of its class; of a function or a method its own."""
    own = _own(processor)
    name: str = getattr(own, "__qualname__", type(own).__name__)
    return name


def _are_scores(value: Any, like: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.shape == like.shape and value.is_floating_point() and value.device == like.device
