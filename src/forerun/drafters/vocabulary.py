"""Do target and drafter speak the same tokens?"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from forerun.errors import TokenizerMismatch
from forerun.models.families import head_size

# One tokenizer is shipped with differently padded embeddings (151936 and 152064 are both Qwen's); paddings seen in the
# field are multiples of 64 to 256, so sizes further apart than this are different tokenizers.
PADDING = 512


def check_vocabularies(
    target: PreTrainedModel, target_tokenizer: Any, draft: PreTrainedModel, draft_tokenizer: Any
) -> None:
    """Raise unless the two models use the same token ids; with both tokenizers at hand that is known, not guessed."""
    if target_tokenizer is not None and draft_tokenizer is not None:
        if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
            raise TokenizerMismatch(_message(target, target_tokenizer, draft, draft_tokenizer))
        return
    sizes = [head_size(model) for model in (target, draft)]
    if abs(sizes[0] - sizes[1]) > PADDING:
        raise TokenizerMismatch(_message(target, target_tokenizer, draft, draft_tokenizer))


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
    return len(tokenizer) if tokenizer is not None else head_size(model)
