"""Reading what `model.generate` has prepared when it calls us as its `custom_generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from forerun.errors import InvalidArgument
from forerun.keywords import KNOWN, REFUSED
from forerun.sources import FROM_MODEL

# Built by transformers from the configuration, which is read itself; anything else in the list is the caller's own.
FROM_CONFIG = frozenset({
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SuppressTokensLogitsProcessor", "SequenceBiasLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
})  # fmt: skip
FROM_CONFIG_CRITERIA = frozenset({"MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria", "StopStringCriteria"})
# What transformers prepares for its own loop and ours does not need.
OWN_STATE = frozenset({
    "attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep", "cache_position",
    "decoder_position_ids",
})  # fmt: skip
# Of an encoder-decoder model, whose encoder has run by then.
DECODER_STATE = frozenset({"encoder_outputs", "decoder_attention_mask"})
SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p"})


def keywords_of(
    config: GenerationConfig | None,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    model_kwargs: dict[str, Any],
    width: int,
) -> Any:
    """Keywords for `SpeculativeDecoder.generate` that mean what the surrounding `model.generate` means.

    `width` is the length of the padded prompts, from which transformers counts `max_length`.
    """
    strange = [type(c).__name__ for c in criteria or () if type(c).__name__ not in FROM_CONFIG_CRITERIA]
    ours = OWN_STATE | (DECODER_STATE if "encoder_outputs" in model_kwargs else frozenset())
    strange += [name for name, value in model_kwargs.items() if name not in ours and value is not None]
    if strange:
        raise InvalidArgument(f"{', '.join(strange)} cannot be honoured by speculative decoding here; leave it out")
    fields = {} if config is None else {name: value for name, value in config.to_dict().items() if value is not None}
    keywords = {name: value for name, value in fields.items() if name in KNOWN or name in REFUSED}
    keywords.pop("num_return_sequences", None)  # the rows that arrive here are copies already
    if keywords.get("min_new_tokens"):
        keywords.pop("min_length", None)  # derived from it
    if "max_length" in keywords:
        keywords["max_new_tokens"] = keywords.pop("max_length") - width
    if not keywords.get("do_sample"):
        keywords = {name: value for name, value in keywords.items() if name not in SAMPLING}
    own = [p for p in processors or () if type(p).__name__ not in FROM_CONFIG]
    return keywords | ({"logits_processor": own} if own else {})


def decoder_inputs(ids: Tensor, model_kwargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What an encoder-decoder model's rows begin with. What its configuration does not ask for now, it does not get:
    Whisper clears fields that it has made processors of."""
    given = {name: model_kwargs.get(name) for name in DECODER_STATE}
    unasked = dict.fromkeys(name for name in FROM_MODEL if name not in keywords)
    return {"decoder_input_ids": ids, **given, **unasked}
