"""Which models can be made ragged, how, and how far they can see. What cannot be cut back is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import UnsupportedModel

# Layers whose state is keys and values, one a token. Anything else in `config.layer_types` keeps state of another kind.
REWINDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Families that compute attention in their own modules but take an additive 4-D mask and any `Cache`. BLOOM and ALiBi
# Falcon are among them: ALiBi depends on the key's position alone up to a constant a row, which softmax ignores.
MASKED_FAMILIES = frozenset({"codegen", "gptj", "falcon", "bloom"})

# Encoder-decoder families: absolute positions looked up in `embed_positions`, given as `position_ids`, or T5's bias.
# All cross-attend with keys that are a projection of the encoder's states and nothing else.
SEQ2SEQ_FAMILIES = frozenset({
    "t5", "mt5", "bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "whisper", "moonshine",
})  # fmt: skip


class Layout(Enum):
    """How the rows of a pass are laid out for the model."""

    PACKED = "packed"  # [1, N]: rows one after the other, no padding; attention comes through the interface
    PADDED = "padded"  # [B, T]: rows padded on the right; the model's own attention with a 4-D mask


@dataclass(frozen=True, slots=True)
class Family:
    """What the scorer must know of a model."""

    layout: Layout
    context_length: int | None  # tokens a row may hold, None where positions are not bounded
    vocab_size: int
    alibi_in_scores: bool  # the family adds ALiBi to its scores itself and must not find a 4-D mask to fold it into
    takes_trees: bool = True  # False where a key's place in the cache is its position, as ALiBi has it


def inspect(model: PreTrainedModel, *, headless: bool = False) -> Family:
    """Find out how to run a model, or say why it cannot be run. A `headless` one is asked for hidden states only."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder model, which takes a Seq2SeqScorer: make it one, or give "
            "the model to SpeculativeDecoder"
        )
    _refuse_unloaded(model)
    _refuse_unrewindable(model, config)
    head = None if headless else model.get_output_embeddings()
    if not headless and head is None and not hasattr(model, "lm_head"):
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    vocab_size = config.vocab_size if head is None else head_size(model)
    alibi = config.model_type == "falcon" and config.alibi
    by_place = alibi or config.model_type == "bloom"
    return Family(_layout(model, config), _context_length(config), vocab_size, alibi, not by_place)


def inspect_seq2seq(model: PreTrainedModel) -> Family:
    """The same for an encoder-decoder model, of which the decoder is what runs on ragged rows."""
    kind = model.config.model_type
    if kind not in SEQ2SEQ_FAMILIES:
        raise UnsupportedModel(
            f"{type(model).__name__} ({kind}) is an encoder-decoder model whose cross-attention Forerun does not know; "
            f"known are {', '.join(sorted(SEQ2SEQ_FAMILIES))}; use model.generate for it"
        )
    _refuse_unloaded(model)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head; load it with AutoModelForSeq2SeqLM")
    limit = getattr(model.config, "max_target_positions", None) or getattr(
        model.config, "max_position_embeddings", None
    )
    return Family(Layout.PACKED, limit, head_size(model), False)


def head_size(model: PreTrainedModel) -> int:
    """Tokens that a model's head has logits for. The weight of a quantised head may be of any shape, or a method."""
    head: Any = model.get_output_embeddings()
    weight: Any = getattr(head, "weight", None)
    told = getattr(head, "out_features", None)
    if type(weight) in (Tensor, nn.Parameter) or (isinstance(weight, Tensor) and told is None):
        return int(weight.shape[0])
    return int(told if told is not None else model.config.get_text_config(decoder=True).vocab_size)


def _refuse_unloaded(model: PreTrainedModel) -> None:
    """Weights on the meta device have no values, unless accelerate fetches them for each forward."""
    if any(p.is_meta for p in model.parameters()) and not any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedModel(
            f"{type(model).__name__} has weights on the meta device, which have no values; load them with "
            "from_pretrained, or with load_state_dict(..., assign=True)"
        )


def _refuse_unrewindable(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    odd = set(getattr(config, "layer_types", None) or ()) - REWINDABLE_LAYERS
    if getattr(model, "_is_stateful", False) or odd:
        what = f"layers of kind {', '.join(sorted(odd))}" if odd else "recurrent state"
        raise UnsupportedModel(
            f"{name} keeps {what}, which cannot be cut back after a rejected draft; "
            "use a model whose layers are all attention"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(
            f"{name} shares keys between layers, which the ragged cache does not hold yet; use model.generate"
        )


def _layout(model: PreTrainedModel, config: Any) -> Layout:
    if config.model_type in MASKED_FAMILIES:
        if "flash" in str(config._attn_implementation):
            raise UnsupportedModel(
                f"{type(model).__name__} was loaded with attn_implementation={config._attn_implementation!r}, which "
                "takes no 4-D mask; load it with attn_implementation='eager'"
            )
        return Layout.PADDED
    if getattr(model, "_supports_attention_backend", False):
        return Layout.PACKED
    raise UnsupportedModel(
        f"{type(model).__name__} ({config.model_type}) does not call attention through transformers' attention "
        f"interface, and is none of {', '.join(sorted(MASKED_FAMILIES))}; use model.generate for it"
    )


def _context_length(config: Any) -> int | None:
    """Positions the model can tell apart; where RoPE depends on the longest row, only up to where it switches.

    Long-RoPE and dynamic RoPE choose frequencies from the largest position in the batch, so past that point a long
    neighbour would change everyone's numbers.
    """
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        return None
    limit = getattr(config, "max_position_embeddings", None)
    for rope in _rope_settings(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in {"longrope", "dynamic"} and original:
            limit = min(limit or original, original)
    return limit


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
