"""Reading what `model.generate` has prepared when it calls us as its `custom_generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from forerun.errors import InvalidArgument
from forerun.keywords import KNOWN, REFUSED

# Built by transformers from the configuration, which is read itself; anything else in the list is the caller's own.
FROM_CONFIG = frozenset({
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SuppressTokensLogitsProcessor", "SequenceBiasLogitsProcessor",
})  # fmt: skip
FROM_CONFIG_CRITERIA = frozenset({"MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria", "StopStringCriteria"})
# What transformers prepares for its own loop and ours does not need.
OWN_STATE = frozenset(
    {"attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep", "cache_position"}
)
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
    strange += [name for name, value in model_kwargs.items() if name not in OWN_STATE and value is not None]
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
