"""What a call gives an encoder-decoder model: sources for the encoder, and how the decoder's text begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from forerun.arguments import entries, integer, one_or_several, refuse, shown
from forerun.errors import InvalidArgument
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source
from forerun.unpadded import check_ids, check_mask, check_tensor, unpadded

# Keywords of `generate` that are read here and nowhere else.
OWN = frozenset({
    "input_ids", "input_features", "input_values", "decoder_input_ids", "decoder_attention_mask",
    "decoder_start_token_id", "encoder_outputs",
})  # fmt: skip
# Ids that an encoder-decoder model's own configuration forces or forbids: without them its text is not the model's.
FROM_MODEL = (
    "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's rows, and the keywords that are left."""

    sources: tuple[Source, ...]
    prompts: list[list[int]]
    like: Tensor  # [B, L] the decoder's prompts, after which sequences take their width, dtype and device
    keywords: dict[str, Any]


def read_inputs(
    scorer: Seq2SeqScorer,
    inputs: Tensor | None,
    mask: Tensor | None,
    keywords: Mapping[str, Any],
    config: GenerationConfig,
) -> Inputs:
    """As `model.generate` reads them; `inputs` is what was given without a name, or as `input_ids`."""
    own = {name: value for name, value in keywords.items() if name in OWN and value is not None}
    rest = {name: value for name, value in keywords.items() if name not in OWN}
    name = scorer.encoder.name
    if inputs is not None:
        check_tensor(inputs, "input_ids", f"give a tensor of {name}")
        # A model that does not read text takes token ids for the decoder's, as transformers does.
        is_text = not inputs.is_floating_point() and not scorer.encoder.reads_text
        meant = "decoder_input_ids" if is_text else name
        if meant in own:
            raise InvalidArgument(f"input_ids stands for {meant} here, which is given as well: leave one out")
        own[meant] = inputs
    sources = _sources(own.pop(name, None), own.pop("encoder_outputs", None), mask, scorer)
    if strange := sorted(own.keys() & {"input_ids", "input_features", "input_values"}):
        raise InvalidArgument(f"{', '.join(strange)}: {type(scorer.model).__name__}'s encoder reads {name}")
    configs = [c for c in (rest.get("generation_config"), config) if c is not None]
    ids = _decoder_ids(own, len(sources), scorer, configs)
    given = {**{field: _of_first(configs, field) for field in FROM_MODEL}, **rest}
    prompts = unpadded(
        ids, own.get("decoder_attention_mask"), "decoder_input_ids", scorer.vocab_size, "decoder_attention_mask"
    )
    return Inputs(sources, prompts, ids, given)


def _of_first(configs: Sequence[GenerationConfig], field: str) -> Any:
    """As in transformers, the model's own configuration fills in what the caller's leaves open."""
    found = (getattr(config, field, None) for config in configs)
    return next((value for value in found if value is not None), None)


def refuse_for_causal(keywords: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Inputs of an encoder mean nothing to a model without one."""
    if strange := sorted(name for name, value in keywords.items() if name in OWN and value is not None):
        raise InvalidArgument(f"{', '.join(strange)}: {type(model).__name__} has no encoder; give input_ids")


def _sources(inputs: Any, states: Any, mask: Tensor | None, scorer: Seq2SeqScorer) -> tuple[Source, ...]:
    name = scorer.encoder.name
    if states is not None:
        return _from_states(states, inputs if scorer.encoder.reads_text else None, mask, scorer.encoder.width)
    if inputs is None:
        raise InvalidArgument(f"{type(scorer.model).__name__} reads a source: give {name}")
    if scorer.encoder.reads_text:
        return tuple(Source(ids=tuple(row)) for row in unpadded(inputs, mask, name, _num_embeddings(scorer)))
    _check_numbers(inputs, name, "give a tensor of numbers with one row a source")
    masks: Sequence[Tensor | None] = [None] * len(inputs)
    if mask is not None:
        check_tensor(mask, "attention_mask", "give a tensor of ones and zeros with one row a source")
        if mask.ndim < 2 or len(mask) != len(inputs):
            raise InvalidArgument(f"attention_mask is {tuple(mask.shape)} for {len(inputs)} sources: give one row each")
        check_mask(mask, tuple(mask.shape), name)
        masks = list(mask)
    return tuple(Source(features=row, mask=own) for row, own in zip(inputs, masks, strict=True))


def _num_embeddings(scorer: Seq2SeqScorer) -> int | None:
    """Ids that the encoder can read."""
    weight = getattr(scorer.encoder.module.get_input_embeddings(), "weight", None)
    return None if weight is None else int(weight.shape[0])


def _check_numbers(values: Any, name: str, remedy: str) -> None:
    check_tensor(values, name, remedy)
    if not values.is_floating_point() or values.ndim < 2 or not len(values):
        raise InvalidArgument(f"{name}={shown(values)}: {remedy}")
    if not bool(values.isfinite().all()):
        raise InvalidArgument(f"{name} holds NaN or infinite numbers: {remedy}")


def _from_states(given: Any, ids: Tensor | None, mask: Tensor | None, width: int) -> tuple[Source, ...]:
    """Encoder outputs [B, S, H]: what the mask leaves of each row."""
    remedy = f"give states [batch, length, {width}], or what the encoder returned"
    found = entries(given)  # a tuple of tensors; a model's output is none, but has them by place, too
    if not isinstance(given, Tensor) and not (found or isinstance(given, ModelOutput)):
        refuse("encoder_outputs", given, remedy)
    states: Tensor = given if isinstance(given, Tensor) else given[0]
    _check_numbers(states, "encoder_outputs", remedy)
    if states.ndim != 3 or states.shape[2] != width:
        refuse("encoder_outputs", states, remedy)
    mask = getattr(given, "attention_mask", None) if getattr(given, "attention_mask", None) is not None else mask
    if mask is not None:
        check_tensor(mask, "attention_mask", "give a tensor of ones and zeros with one row a source")
        # Another shape is that of the audio, whose states are fewer and all there.
        mask = check_mask(mask, tuple(mask.shape), "encoder_outputs") if mask.shape == states.shape[:2] else None
    words = unpadded(ids, mask, "input_ids") if ids is not None else [[]] * len(states)
    if len(words) != len(states):
        raise InvalidArgument(f"encoder_outputs has {len(states)} rows and input_ids {len(words)}: make them agree")
    rows = states if mask is None else [row[real] for row, real in zip(states, mask, strict=True)]
    return tuple(Source(ids=tuple(own), states=row) for own, row in zip(words, rows, strict=True))


def _decoder_ids(own: dict[str, Any], count: int, scorer: Seq2SeqScorer, configs: Sequence[GenerationConfig]) -> Tensor:
    """[B, L] as in transformers: the start token, or the caller's own beginning with it in front."""
    ids: Tensor | None = own.get("decoder_input_ids")
    if ids is not None:
        ids = check_ids(ids, "decoder_input_ids")
        if len(ids) != count:
            shape = tuple(ids.shape)
            raise InvalidArgument(f"decoder_input_ids has shape {shape}: give [{count}, length], a row a source")
    mask = own.get("decoder_attention_mask")
    if mask is not None and ids is None:
        raise InvalidArgument("decoder_attention_mask without decoder_input_ids: give both, or neither")
    if mask is not None and ids is not None:
        check_mask(mask, tuple(ids.shape), "decoder_input_ids", "decoder_attention_mask")
    takes_any_start = scorer.model.config.model_type == "whisper"
    if ids is not None and takes_any_start:
        return ids
    start = _start(own.get("decoder_start_token_id"), count, configs, scorer.vocab_size)
    start = start.to("cpu" if ids is None else ids.device)
    if ids is None:
        return start
    if bool((ids[:, :1] == start).any()):
        return ids
    if mask is not None:
        own["decoder_attention_mask"] = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
    return torch.cat([start, ids], dim=1)


def _start(given: Any, count: int, configs: Sequence[GenerationConfig], vocab_size: int) -> Tensor:
    """[B, 1]"""
    for value in (given, _of_first(configs, "decoder_start_token_id"), _of_first(configs, "bos_token_id")):
        if value is not None:
            ids = one_or_several("decoder_start_token_id", value, partial(integer, low=0, high=vocab_size - 1))
            start = torch.tensor(ids).reshape(-1, 1)
            if len(start) not in (1, count):
                raise InvalidArgument(
                    f"decoder_start_token_id has {len(start)} entries for {count} sources: give one each"
                )
            return start.expand(count, 1)
    raise InvalidArgument(
        "how does the decoder begin? The model's generation_config has no decoder_start_token_id: pass "
        "decoder_start_token_id= or decoder_input_ids="
    )
