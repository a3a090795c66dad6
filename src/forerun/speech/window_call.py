"""What transformers asks of one batch of windows, read from the configuration and processors it has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import WhisperNoSpeechDetection

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.inside_generate import Processors, limits_of, refuse_by_row, refuse_unknown_state
from forerun.keywords import SAMPLING, id_set, refuse_unless_neutral
from forerun.speech.rules import Rules

REFUSED = {
    "num_beams": "beam search is not sampling; leave it out",
    "output_attentions": "a draft has no attentions of single tokens; use return_timestamps",
    "output_hidden_states": "leave it out",
    "output_logits": "ask for output_scores",
}


@dataclass(frozen=True, slots=True)
class WindowCall:
    """One call: the same for all its rows."""

    budget: int  # new tokens
    params: SamplingParams
    ends: frozenset[int]
    pad: int
    rules: Rules | None  # None where `others` have to be called one position at a time
    others: tuple[Any, ...]  # processors, in order
    warpers: tuple[Any, ...]  # those that `params` speak of
    detector: WhisperNoSpeechDetection | None
    wants_scores: bool
    wants_dict: bool

    @classmethod
    def of(
        cls, model: PreTrainedModel, processors: Sequence[Any], config: GenerationConfig, input_ids: Tensor
    ) -> WindowCall:
        grouped = Processors.of(processors, config, model, input_ids.shape[1])
        refuse_by_row(grouped.before, len(input_ids))
        others = tuple(p for p in grouped.before if not isinstance(p, WhisperNoSpeechDetection))
        return cls(
            budget=int(config.max_length or 0) - input_ids.shape[1],
            params=_params(config),
            ends=id_set(config.eos_token_id),
            pad=int(config.pad_token_id),
            rules=Rules.of(others, input_ids.device),
            others=others,
            warpers=grouped.warpers,
            detector=next((p for p in grouped.before if isinstance(p, WhisperNoSpeechDetection)), None),
            wants_scores=bool(config.return_dict_in_generate and config.output_scores),
            wants_dict=bool(config.return_dict_in_generate),
        )


def refuse_unsupported(
    config: GenerationConfig, criteria: Sequence[Any], model_kwargs: dict[str, Any], streamer: Any = None
) -> None:
    """Nothing is ignored: what cannot be honoured is named."""
    if streamer is not None:
        raise InvalidArgument("a streamer cannot follow windows that may be tried again; leave it out")
    for name, remedy in REFUSED.items():
        refuse_unless_neutral(name, getattr(config, name, None), remedy)
    _refuse_other_ends(config, criteria)
    refuse_unknown_state(model_kwargs)


def _refuse_other_ends(config: GenerationConfig, criteria: Sequence[Any]) -> None:
    """A window ends where the configuration says: criteria that say else are the caller's own."""
    limits = limits_of(criteria)
    wanted = {"max_length": config.max_length, "eos_token_id": sorted(id_set(config.eos_token_id))}
    if "eos_token_id" in limits:
        limits["eos_token_id"] = sorted(limits["eos_token_id"])
    if strange := {name: value for name, value in limits.items() if value != wanted.get(name)}:
        said = ", ".join(f"{name}={value!r}" for name, value in strange.items())
        raise InvalidArgument(
            f"stopping_criteria with {said} cannot be honoured by speculative decoding of windows, which end at "
            f"eos_token_id and max_new_tokens; leave them out"
        )


def _params(config: GenerationConfig) -> SamplingParams:
    """As in transformers, whose Whisper also keeps to the 50 likeliest tokens where it samples and nobody says else."""
    if not config.do_sample:
        return SamplingParams()
    named = {name: getattr(config, name) for name in SAMPLING}
    return SamplingParams(**{"temperature": 1.0} | {name: value for name, value in named.items() if value is not None})
