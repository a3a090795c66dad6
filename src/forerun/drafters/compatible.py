"""Whether a draft model fits its target: the same token ids, and a source that both can read."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from forerun.errors import InvalidArgument, TokenizerMismatch
from forerun.models.encoder import Encoder
from forerun.models.families import head_size
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer

# One tokenizer is shipped with differently padded embeddings (151936 and 152064 are both Qwen's); paddings seen in the
# field are multiples of 64 to 256, so sizes further apart than this are different tokenizers.
PADDING = 512
DIGEST = "vocabulary:sha256:"  # what `vocabulary_digest` begins with


def check_vocabularies(
    target: PreTrainedModel, target_tokenizer: Any, draft: PreTrainedModel, draft_tokenizer: Any
) -> None:
    """Raise unless the two models use the same token ids; with both vocabularies at hand that is known, not guessed.

    A tokenizer that only decodes, which is enough for stop strings, tells no vocabulary: sizes are compared then.
    """
    if all(hasattr(tokenizer, "get_vocab") for tokenizer in (target_tokenizer, draft_tokenizer)):
        if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
            raise TokenizerMismatch(_message(target, target_tokenizer, draft, draft_tokenizer))
        return
    sizes = [head_size(model) for model in (target, draft)]
    if abs(sizes[0] - sizes[1]) > PADDING:
        raise TokenizerMismatch(_message(target, target_tokenizer, draft, draft_tokenizer))


def vocabulary_digest(tokenizer: Any) -> str | None:
    """Tells tokens and their ids; None of a tokenizer that only decodes."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return DIGEST + hashlib.sha256(text.encode()).hexdigest()


def _message(target: PreTrainedModel, target_tokenizer: Any, draft: PreTrainedModel, draft_tokenizer: Any) -> str:
    names = " and ".join(
        f"{model.config.name_or_path or type(model).__name__} ({_size(model, tokenizer)} tokens)"
        for model, tokenizer in ((target, target_tokenizer), (draft, draft_tokenizer))
    )
    return (
        f"target and draft do not share a tokenizer: {names}; choose a draft model of the same family, or a drafter "
        "that needs none, such as PromptLookup()"
    )


def _size(model: PreTrainedModel, tokenizer: Any) -> int:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else head_size(model)


def check_encoders(target: Scorer, draft: Scorer, shares_encoder: bool) -> None:
    """Raise unless the draft's encoder, or its cross-attention over the target's, fits the target."""
    if not isinstance(draft, Seq2SeqScorer):
        if shares_encoder:
            raise InvalidArgument(f"shares_encoder=True: {type(draft.model).__name__} has no cross-attention")
        return
    if not isinstance(target, Seq2SeqScorer):
        raise InvalidArgument(
            f"the draft {type(draft.model).__name__} reads a source and the target {type(target.model).__name__} has "
            "none; choose a decoder-only draft"
        )
    mine, other = draft.encoder, target.encoder
    if shares_encoder and mine.width != other.width:
        raise InvalidArgument(
            f"shares_encoder=True: the target's encoder states are {other.width} wide and the draft's cross-attention "
            f"reads {mine.width}; leave shares_encoder out, so that the draft reads with an encoder of its own"
        )
    if not shares_encoder and mine.name != other.name:
        raise InvalidArgument(f"the target's encoder reads {_described(other)} and the draft's {_described(mine)}")


def _described(encoder: Encoder) -> str:
    return f"{encoder.name} ({type(encoder.module).__name__})"
