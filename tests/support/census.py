"""One shrunk random model of every type that transformers lists as causal or as encoder-decoder.

A recipe is a model class, the small value of every field that its configuration knows (`SMALL`), and what one type
needs beyond that (`CAUSAL`, `SEQ2SEQ`). Types that no recipe can build are listed with the reason (`NOT_BUILT`).
`support.census_judge` says what Forerun makes of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from support.tiny import calm, roughen

VOCAB = 97
WINDOW = 8  # less than the prompts of the census are long

Settings = dict[str, Any]

# What every configuration gets that has a field of the name. Heads are grouped, values are of another size than keys
# where a type allows it, experts are few.
SMALL: Settings = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "max_target_positions": 256,
    # widths
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "intermediate_size": 48, "ffn_dim": 48,
    "d_ff": 48, "dim_ff": 48, "dff": 48, "d_inner": 48, "n_inner": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "dense_intermediate_size": 48, "feed_forward_size": 48,
    "embedding_size": 32, "word_embed_proj_dim": 32, "input_embedding_size": 32, "output_embedding_size": 32,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
    # layers and heads
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_blocks": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8,
    "dim_head": 8, "d_head": 8, "rotary_dim": 4, "kv_channels": 8,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    # windows
    "sliding_window": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW, "attention_chunk_size": WINDOW,
    "sliding_window_size": WINDOW, "local_attention": WINDOW,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_shared_experts": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "zero_expert_num": 2, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_latent_size": None,
    # recurrent layers
    "state_size": 4, "mamba_d_state": 4, "ssm_state_size": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_ssm": 64, "n_groups": 1, "mamba_n_groups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "lru_width": 32, "mamba_chunk_size": 8, "chunk_size": 8,
    # indexers of sparse attention
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 6,
    # encoders, of texts and of sounds
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "encoder_no_repeat_ngram_size": 0, "num_mel_bins": 8,
    "max_source_positions": 24, "begin_suppress_tokens": None, "decoder_vocab_size": VOCAB,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4, "pad_head_dim_to_multiple_of": 12, "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    # nothing that is drawn
    "dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "dropout_rate": 0.0,
    "use_sliding_window": True, "max_window_layers": 1, "original_max_position_embeddings": 256,
}  # fmt: skip

SLIDING_AND_FULL = ("sliding_attention", "full_attention")
INDEXER: Settings = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                     "indexer_compress_ratio": 4}  # fmt: skip
# A layer without rotation, whose queries are scaled by position, from the eighth token on.
TEMPERED: Settings = {"no_rope_layers": [1, 0], "floor_scale": 8}

# A post-norm decoder that is tied to its embeddings says one token for ever.
UNTIED: Settings = {"tie_word_embeddings": False}

# What one type needs beyond SMALL.
CAUSAL: dict[str, Settings] = {
    "moshi": {"sliding_window": 256},  # past it `model.generate` depends on how it got there: see `models.families`
    **dict.fromkeys(("bart", "cpmant", "marian", "mvp", "openai-gpt", "plbart", "roformer", "trocr", "xlm"), UNTIED),
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": [*SLIDING_AND_FULL] * 2, "num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    **dict.fromkeys(("llama4", "llama4_text"), TEMPERED),
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 16),
                 "attn_layers": ["local", "local"], "local_attn_chunk_length": 8},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention",
              "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

SEQ2SEQ: dict[str, Settings] = {
    **dict.fromkeys(("bart", "blenderbot-small", "t5"), UNTIED),
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "marian": {"scale_embedding": True, "tie_word_embeddings": False, "share_encoder_decoder_embeddings": True},
}  # fmt: skip

# The same type built in another way that Forerun has to tell apart. Encoders become decoders when told so.
AS_DECODER = {"decoder": {"is_decoder": True}}
VARIANTS: dict[str, dict[str, Settings]] = {
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    ), AS_DECODER),
    # Of ALiBi's slopes for twelve heads some are no powers of two, and their products with places are rounded.
    "falcon": {"alibi": {"alibi": True, "new_decoder_architecture": False, "hidden_size": 48,
                         "num_attention_heads": 12}},
    "bloom": {"twelve heads": {"hidden_size": 48, "n_head": 12}},
    "mpt": {"twelve heads": {"d_model": 48, "n_heads": 12}},
    "xmod": {"decoder": {"is_decoder": True, "default_language": "en_XX"}},
}  # fmt: skip

# Modules that only run in float32.
FLOAT32 = frozenset({"xglm", "xlnet"})

# Layers whose every sum is normalised anew drown the token just read, and one token is said for ever: such types get
# their layers' matrices scaled down by this.
CALM: dict[str, float] = {
    "bart": 0.5, "big_bird": 0.3, "blenderbot-small": 0.5, "data2vec-text": 0.5, "electra": 0.5, "git": 0.5,
    "gpt_neox": 0.3, "marian": 0.5, "mvp": 0.5, "openai-gpt": 0.5, "persimmon": 0.3, "plbart": 0.5, "reformer": 0.05,
    "rembert": 0.3, "roberta": 0.5, "roc_bert": 0.3, "trocr": 0.3, "xlnet": 0.5, "xmod": 0.3,
}  # fmt: skip

CALM_DECODERS = {
    "bart": 0,
    "blenderbot-small": 4,
    "marian": 3,
    "plbart": 0,
}  # and the seed that gives them something to say

NOT_BUILT: dict[str, str] = {
    "blt": "`model.generate` itself fails: its configuration has no number of layers for a cache",
    "fun_asr_nano": "its parts' sizes are tied to those of the published model",
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "it reads the keys of the model it assists, and has no text of its own",
    "gemma4_unified_assistant": "it reads the keys of the model it assists, and has no text of its own",
    "kyutai_speech_to_text": "it reads codebooks of sound beside its text",
    "moonshine_streaming": "its configuration has no number of key heads, which its own modules ask for",
    "musicgen": "it reads and writes several codebooks of sound at once, not text",
    "musicgen_melody": "it reads and writes several codebooks of sound at once, not text",
    "nemo_speechlm": "its parts' sizes are tied to those of the published model",
    "qwen3_asr": "its default configuration is refused by transformers' own validation",
    "vibevoice": "it writes sound, not text",
    "vibevoice_asr": "its sound encoder cannot be shrunk by its configuration",
    "voxtral_realtime": "it writes text along a sound that has to be given to every step",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one type is built."""

    model_type: str
    class_name: str
    overrides: Settings = field(default_factory=dict)  # of fields, or of a part's configuration by the part's name
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_type} ({self.variant})" if self.variant else self.model_type


def causal_recipes() -> list[Recipe]:
    """Every type of MODEL_FOR_CAUSAL_LM_MAPPING that can be built, variants after their type."""
    return _recipes(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, CAUSAL, VARIANTS)


def seq2seq_recipes() -> list[Recipe]:
    """Every type of the two mappings of encoder-decoder models, texts and speech, that can be built."""
    both = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return _recipes(both, SEQ2SEQ, {})


def _recipes(
    names: Mapping[str, str], overrides: Mapping[str, Settings], variants: Mapping[str, Mapping[str, Settings]]
) -> list[Recipe]:
    made = []
    for model_type in sorted(set(names) - set(NOT_BUILT)):
        made.append(Recipe(model_type, names[model_type], overrides.get(model_type, {})))
        for variant, changes in variants.get(model_type, {}).items():
            both = overrides.get(model_type, {}) | changes
            made.append(Recipe(model_type, names[model_type], both, variant))
    return made


def configuration(config_class: Any, overrides: Mapping[str, Any]) -> Any:
    """The smallest configuration of a class: `SMALL` as far as its fields go, then `overrides`."""
    default = config_class()
    known = {f.name: f.default for f in dataclasses.fields(config_class)}
    settings = {n: v for n, v in SMALL.items() if n in known and not isinstance(known[n], dict | list | tuple)}
    if "qk_rope_head_dim" in known and "head_dim" in known:  # the part of a head that is rotated
        settings["head_dim"] = SMALL["qk_rope_head_dim"]
    if "kv_lora_rank" in known:  # one latent serves all heads, so there are no groups
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in config_class.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            settings[name] = configuration(type(part), overrides.get(name, {}))
    settings |= {name: value for name, value in overrides.items() if name not in config_class.sub_configs}
    for kinds in ("layer_types", "mlp_layer_types"):
        if kinds in known and kinds not in overrides and (found := getattr(default, kinds, None)):
            distinct = list(dict.fromkeys(found))
            settings[kinds] = [distinct[i % len(distinct)] for i in range(settings.get("num_hidden_layers", 2))]
    return config_class(**settings)


def build(recipe: Recipe) -> PreTrainedModel:
    """A random model in eval mode on the CPU, in float64 where its modules allow it, without an end token."""
    model_class = getattr(transformers, recipe.class_name)
    config = configuration(model_class.config_class, recipe.overrides)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(CALM_DECODERS.get(recipe.model_type, 0) if config.is_encoder_decoder else 0)
        model: PreTrainedModel = model_class(config).eval().requires_grad_(False)
        roughen(model)
        if config.is_encoder_decoder:
            if recipe.model_type in CALM_DECODERS:
                calm(model)
        elif (factor := CALM.get(recipe.model_type)) is not None:
            _scale_layers(model, factor)
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        part.eos_token_id = None
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    if model.config.is_encoder_decoder:
        settings.decoder_start_token_id = settings.bos_token_id = 1
    model.set_experts_implementation("eager")  # the others know no float64
    return model if recipe.model_type in FLOAT32 else model.double()


def _scale_layers(model: PreTrainedModel, factor: float) -> None:
    """Scale down what layers add to the stream."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and any(part.isdigit() for part in name.split(".")):
            weight.mul_(factor)
