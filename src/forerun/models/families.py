"""Which models can be made ragged, how, and how far they can see. What cannot be cut back is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.arguments import refuse
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.models.passes import own_name

# Layers whose state is keys and values, one a token. Anything else in `config.layer_types` keeps state of another kind.
REWINDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Families whose layers call transformers' attention interface although their classes do not say so.
INTERFACE_FAMILIES = frozenset({
    "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart",
    "stablelm", "whisper",
})  # fmt: skip

# Families that compute attention in their own modules but take an additive 4-D mask and any `Cache`.
OWN_ATTENTION = frozenset({
    "big_bird", "bloom", "codegen", "falcon", "git", "gptj", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt",
    "mvp", "rembert", "trocr", "xglm",
})  # fmt: skip

# Families that make something of a row's keys and values between the cache and attention: latent attention expands
# them, DiffLlama and JetMoE repeat them, Doge makes a mask of them. Others are found out in their first pass, which
# `Scorer` then repeats.
WHOLE_ROWS = frozenset({
    "axk1", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "glm4_moe_lite", "jetmoe", "longcat_flash", "minicpm3",
    "youtu",
})  # fmt: skip

# ALiBi: positions are told from where keys lie. Padded rows lie so that distances within a row are right, and a
# constant a row more or less is nothing to the softmax. GPT-Neo's local layers tell their window in the same way.
# BLOOM and Falcon round a place's bias, to which such a constant is not nothing: they count places by a mask.
BY_PLACE = frozenset({"bloom", "gpt_neo", "mpt"})

# What is left, and why.
REASONS = {
    "blt": "reads bytes in patches of its own making, whose number is not the number of tokens",
    "cpmant": "puts a learned prompt before the text and counts positions from there",
    "openai-gpt": "keeps no keys: every token is computed anew",
    "prophetnet": "predicts several tokens at once by streams of its own, each with a mask of its own",
    "reformer": "keeps buckets of hashed states instead of keys",
    "roformer": "rotates by the length of the cache, which is the same for all rows",
    "xlm": "keeps no keys: every token is computed anew",
    "xlnet": "keeps no keys: every token is computed anew, in an order of its own",
}

_COUNTS = "counts its decoder's positions from the length of the cache, which is the same for all rows"
_IN_PARTS = "keeps its decoder's sizes in a part of its configuration, where passes do not look for them"
_FULL = "sends tokens to experts until these are full, so that a draft changes what becomes of other tokens"
_SWITCHES = (
    "changes its encoder's attention for good at the first short source, so that a text depends on what was read before"
)
_PROJECTS = "projects its encoder's states in the decoder, before the layers' own projections make keys of them"
_ATTENDS = "computes attention in modules of its own, which rows with an encoder do not go through"

# Encoder-decoder families that are left, and why. Others were not tried.
SEQ2SEQ_REASONS = {
    **dict.fromkeys(
        ("led", "m2m_100", "pegasus_x", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5"),
        _COUNTS,
    ),
    **dict.fromkeys(("canary", "encoder-decoder", "speech-encoder-decoder", "t5gemma", "t5gemma2"), _IN_PARTS),
    **dict.fromkeys(("nllb-moe", "switch_transformers"), _FULL),
    **dict.fromkeys(("fsmt", "mvp"), _ATTENDS),
    "bigbird_pegasus": _SWITCHES,
    "cohere_asr": _PROJECTS,
    "dia": "writes several codebooks of sound at once, not text",
    "pop2piano": "puts a composer's vector before the sound, in a generate of its own",
    "umt5": "has a table of position biases in every layer",
}

# Encoder-decoder families: absolute positions looked up in `embed_positions`, given as `position_ids`, or T5's bias.
# All cross-attend with keys that are a projection of the encoder's states and nothing else.
SEQ2SEQ_FAMILIES = frozenset({
    "t5", "mt5", "longt5", "bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "whisper",
    "moonshine",
})  # fmt: skip


LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")


class Layout(Enum):
    """How the rows of a pass are laid out for the model."""

    PACKED = "packed"  # [1, N]: rows one after the other, no padding; attention comes through the interface
    PADDED = "padded"  # [B, T]: whole rows side by side, see `models.padded`; the model may attend as it likes


@dataclass(frozen=True, slots=True)
class Family:
    """What the scorer must know of a model."""

    layout: Layout
    context_length: int | None  # tokens a row may hold, None where positions are not bounded
    vocab_size: int
    alibi_in_scores: bool  # the family adds ALiBi to its scores itself and must not find a 4-D mask to fold it into
    shares_keys: bool = False  # layers attend to what earlier ones have cached
    by_place: bool = False  # a key's place in the cache is its position, as ALiBi has it: no trees, no positions told
    key_copies: int = 1  # heads that the model caches one after the other though they are the same: one is kept
    places_by_mask: bool = False  # the family counts places by a 2-D mask [B, S], pads in front left out
    counting_layers: frozenset[int] = frozenset()  # those that count positions from the length of the cache


def check_model(name: str, value: Any) -> None:
    """A loaded language model: a module with a configuration. What it can do is found out later."""
    if isinstance(value, type):
        refuse(name, value, f"is a class; load a model, {value.__name__}.from_pretrained(...)")
    if isinstance(value, nn.Module) and hasattr(value, "config"):
        return
    if isinstance(value, tuple) and any(isinstance(part, nn.Module) for part in value):
        raise InvalidArgument(
            f"{name}: a tuple of a model and more, as forerun.load gives; write model, tokenizer = forerun.load(NAME), "
            "and give the model"
        )
    if isinstance(value, nn.Module):
        refuse(name, value, "has no configuration; give a model of transformers, such as a LlamaForCausalLM")
    refuse(
        name, value,
        "give a loaded model: AutoModelForCausalLM.from_pretrained(NAME), or forerun.loading.load_model(NAME)[0]",
    )  # fmt: skip


def inspect(model: PreTrainedModel, *, headless: bool = False) -> Family:
    """Find out how to run a model, or say why it cannot be run. A `headless` one is asked for hidden states only."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder model, which takes a Seq2SeqScorer: make it one, or give "
            "the model to SpeculativeDecoder"
        )
    _refuse_unloaded(model)
    _refuse_spread(model)
    if reason := REASONS.get(config.model_type):
        raise UnsupportedModel(f"{type(model).__name__} {reason}; use model.generate for it")
    _refuse_encoder(model)
    _refuse_bidirectional(model, config)
    _refuse_unrewindable(model, config)
    head = None if headless else model.get_output_embeddings()
    if not headless and head is None and not hasattr(model, "lm_head"):
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    vocab_size = config.vocab_size if head is None else head_size(model)
    alibi = config.model_type == "falcon" and config.alibi
    if alibi and own_name(config) == "eager":
        raise UnsupportedModel(
            f"{type(model).__name__} was loaded with attn_implementation='eager', by which transformers adds ALiBi "
            "twice; load it with attn_implementation='sdpa'"
        )
    by_place = alibi or config.model_type in BY_PLACE
    shares_keys = bool(getattr(config, "num_kv_shared_layers", 0))
    copies = _key_copies(config)
    by_mask = alibi or config.model_type == "bloom"
    layout, length = _layout(model, config), context_length(config)
    return Family(layout, length, vocab_size, alibi, shares_keys, by_place, copies, by_mask, _counting_layers(config))


def inspect_seq2seq(model: PreTrainedModel) -> Family:
    """The same for an encoder-decoder model, of which the decoder is what runs on ragged rows."""
    kind = model.config.model_type
    if reason := SEQ2SEQ_REASONS.get(kind):
        raise UnsupportedModel(f"{type(model).__name__} {reason}; use model.generate for it")
    if kind not in SEQ2SEQ_FAMILIES:
        raise UnsupportedModel(
            f"{type(model).__name__} ({kind}) is an encoder-decoder model of a family that was not tried; "
            f"known are {', '.join(sorted(SEQ2SEQ_FAMILIES))}; use model.generate for it"
        )
    _refuse_unloaded(model)
    _refuse_spread(model)
    _refuse_bidirectional(model, model.get_decoder().config)
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
    out_features = getattr(head, "out_features", None)
    if type(weight) in (Tensor, nn.Parameter) or (isinstance(weight, Tensor) and out_features is None):
        return int(weight.shape[0])
    return int(out_features if out_features is not None else model.config.get_text_config(decoder=True).vocab_size)


def _refuse_unloaded(model: PreTrainedModel) -> None:
    """Weights on the meta device have no values, unless accelerate fetches them for each forward."""
    if any(p.is_meta for p in model.parameters()) and not any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedModel(
            f"{type(model).__name__} has weights on the meta device, which have no values; load them with "
            "from_pretrained, or with load_state_dict(..., assign=True)"
        )
    name, first = next(model.named_parameters())
    if first.is_meta:  # it tells a model's device, as transformers has it, and with it where tokens go
        raise UnsupportedModel(
            f"{type(model).__name__} has {name} offloaded to the CPU or the disk, so that nothing says which device it "
            f"runs on; load it with a device_map that keeps {name.rpartition('.')[0]} where it is used"
        )


def _refuse_spread(model: PreTrainedModel) -> None:
    """The cache of a process is on one accelerator. What accelerate fetches to it from the CPU or the disk is fine."""
    places = {_place(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = sorted(places - {"cpu", "disk", "meta"})
    if len(devices) > 1:
        split = (
            f", or split it over processes: --tensor-parallel {len(devices)}, in Python "
            f"distributed_config=DistributedConfig(tp_size={len(devices)}) under torchrun"
        )
        raise UnsupportedModel(
            f"{type(model).__name__} has layers on {' and '.join(devices)} (hf_device_map), and one process decodes on "
            f'one accelerator; load it with device_map={{"": 0}}{"" if model.config.is_encoder_decoder else split}'
        )


def _place(place: Any) -> str:
    """A value of `hf_device_map`: an accelerator's number, "cpu", "disk", or a device or its name."""
    name = str(place)
    if name.isdecimal():
        return f"device {name}"
    kind, _, number = name.partition(":")
    return kind if kind in {"cpu", "disk", "meta"} else f"device {number or 0}"


def _refuse_encoder(model: PreTrainedModel) -> None:
    """BERT and its relatives are listed as causal, yet see what follows unless they are told to be decoders."""
    if any(getattr(module, "is_decoder", None) is False for module in model.get_decoder().modules()):
        raise UnsupportedModel(
            f"{type(model).__name__} was loaded as an encoder, whose tokens see those that follow them; load it with "
            "is_decoder=True"
        )


def _refuse_bidirectional(model: PreTrainedModel, config: Any) -> None:
    """transformers' mask builders read this of any family's configuration; attention's modules may say otherwise."""
    if (setting := sees_ahead(config)) is not None:
        name, value, other = setting
        raise UnsupportedModel(
            f"{type(model).__name__} has {name}={value!r} in its configuration, so its tokens see those that follow "
            f"them; load it with {name}={other}"
        )


def sees_ahead(config: Any) -> tuple[str, Any, bool | None] | None:
    """The setting by which tokens see those that follow them, its value, and the value by which they do not."""
    name = "use_bidirectional_attention"
    both_ways = (
        getattr(config, name, None) if hasattr(type(config), name) else None
    )  # others keep it and do not read it
    # Gemma and Gemma 2 make a causal mask all the same, and only an attention that is given none goes by the setting.
    is_masked = config.model_type in {"gemma", "gemma2"} and own_name(config) == "eager"
    if both_ways and both_ways != "vision" and not is_masked:  # "vision" is about the tokens of images alone
        return name, both_ways, None
    if not getattr(config, "is_causal", True):
        return "is_causal", config.is_causal, True
    return None


def _refuse_unrewindable(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    odd = set(getattr(config, "layer_types", None) or ()) - REWINDABLE_LAYERS
    if getattr(model, "_is_stateful", False) or odd:
        what = f"layers of kind {', '.join(sorted(odd))}" if odd else "recurrent state"
        raise UnsupportedModel(
            f"{name} keeps {what}, which the ragged cache cannot hold and cut back after a rejected draft; "
            "use a model whose layers are all attention"
        )
    if (getattr(config, "num_kv_shared_layers", 0) or 0) >= config.num_hidden_layers:
        raise UnsupportedModel(f"{name} has no keys of its own: it reads those of the model that it assists")


def _layout(model: PreTrainedModel, config: Any) -> Layout:
    if config.model_type in WHOLE_ROWS:
        return Layout.PADDED
    if config.model_type in OWN_ATTENTION:
        if "flash" in str(config._attn_implementation):
            raise UnsupportedModel(
                f"{type(model).__name__} was loaded with attn_implementation={config._attn_implementation!r}, which "
                "takes no 4-D mask; load it with attn_implementation='eager'"
            )
        return Layout.PADDED
    if getattr(model, "_supports_attention_backend", False) or config.model_type in INTERFACE_FAMILIES:
        return Layout.PACKED
    raise UnsupportedModel(
        f"{type(model).__name__} ({config.model_type}) does not call attention through transformers' attention "
        f"interface, and is none of {', '.join(sorted(OWN_ATTENTION))}; use model.generate for it"
    )


def _key_copies(config: Any) -> int:
    """Falcon's second architecture hands its cache each key once for every query head that reads it."""
    if config.model_type != "falcon" or not config.new_decoder_architecture:
        return 1
    return int(config.num_attention_heads) // int(config.num_kv_heads)


def _counting_layers(config: Any) -> frozenset[int]:
    """Llama 4 scales the queries of layers without rotation by their positions, and does not ask which were told."""
    if config.model_type != "llama4_text" or not config.attn_temperature_tuning:
        return frozenset()
    return frozenset(index for index, is_rotated in enumerate(config.no_rope_layers) if not is_rotated)


def context_length(config: Any) -> int | None:
    """Positions the model can tell apart; where RoPE depends on the longest row, only up to where it switches.

    Long-RoPE and dynamic RoPE choose frequencies from the largest position in the batch, so past that point a long
    neighbour would change everyone's numbers.
    """
    if (config.model_type == "falcon" and config.alibi) or config.model_type == "bloom":
        return None
    limit = next((positions for name in LIMITS if (positions := getattr(config, name, None))), None)
    if config.model_type == "moshi":  # its cache forgets what lies before the window, which its mask knows nothing of
        limit = min(limit or config.sliding_window, config.sliding_window)
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":  # full attention until then
        limit = min(limit, (5 + 2 * config.num_random_blocks) * config.block_size)
    for rope in _rope_settings(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in {"longrope", "dynamic"} and original:
            limit = min(limit or original, original)
    return limit


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
