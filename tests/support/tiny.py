"""Tiny random models of many families: seconds on one core, yet every family keeps what makes it awkward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "opt", "gpt2", "gpt_neox", "phi3", "codegen", "bloom")
EXTRA_FAMILIES = ("gemma2", "qwen2", "qwen2_moe", "gptj", "falcon_rotary", "falcon_alibi")
REFUSED_FAMILIES = ("mamba", "t5")  # no causal key/value rows that can be cut back
SEQ2SEQ_FAMILIES = ("t5", "t5_gated", "bart", "marian", "whisper")
POST_NORM = ("bart", "marian")
EXTRA_SEQ2SEQ = ("mt5", "mbart", "pegasus", "blenderbot", "moonshine")

Key = tuple[str, int, int, int, str]
Settings = dict[str, Any]
Recipe = tuple[Callable[[Any], PreTrainedModel], Callable[..., Any], Callable[[int], Settings]]

MODERN: Settings = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def _modern(**more: Any) -> Callable[[int], Settings]:
    return lambda layers: {**MODERN, "num_hidden_layers": layers, **more}


def _gpt(**more: Any) -> Callable[[int], Settings]:
    return lambda layers: {"n_embd": 32, "n_head": 4, "n_layer": layers, "n_positions": 512, **more}


def _gemma(**more: Any) -> Callable[[int], Settings]:
    def settings(layers: int) -> Settings:
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        return _modern(sliding_window=8, layer_types=kinds, query_pre_attn_scalar=8, **more)(layers)

    return settings


def _opt(layers: int) -> Settings:
    return {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4,
            "num_hidden_layers": layers, "max_position_embeddings": 512, "dropout": 0.0}  # fmt: skip


def _neox(layers: int) -> Settings:
    return {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": layers,
            "max_position_embeddings": 512}  # fmt: skip


def _falcon(**more: Any) -> Callable[[int], Settings]:
    return lambda layers: {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": layers,
                           "multi_query": False, "max_position_embeddings": 512, **more}  # fmt: skip


def _bloom(layers: int) -> Settings:
    return {"hidden_size": 64, "n_head": 4, "n_layer": layers}


def _moe(layers: int) -> Settings:
    return _modern(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2)(
        layers
    )


def _mamba(layers: int) -> Settings:
    return {"hidden_size": 32, "state_size": 4, "num_hidden_layers": layers, "time_step_rank": 4}


def _t5(layers: int) -> Settings:
    return {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": layers, "dropout_rate": 0.0,
            "decoder_start_token_id": 0}  # fmt: skip


def _t5_gated(layers: int) -> Settings:
    return _t5(layers) | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                          "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}  # fmt: skip


def _bart(**more: Any) -> Callable[[int], Settings]:
    return lambda layers: {"d_model": 32, "encoder_layers": layers, "decoder_layers": layers, "dropout": 0.0,
                           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                           "decoder_ffn_dim": 48, "max_position_embeddings": 128, "decoder_start_token_id": 2,
                           "forced_eos_token_id": None, **more}  # fmt: skip


def _moonshine(layers: int) -> Settings:
    return {"hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": layers,
            "decoder_num_hidden_layers": layers, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "pad_head_dim_to_multiple_of": 12, "max_position_embeddings": 128, "decoder_start_token_id": 1}  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "llama": (LlamaForCausalLM, LlamaConfig, _modern()),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _modern(hidden_size=48, head_dim=16)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _modern(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _gemma()),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, _gemma(attn_logit_softcapping=5.0, final_logit_softcapping=10.0)),
    "mistral": (MistralForCausalLM, MistralConfig, _modern(sliding_window=8)),
    "opt": (OPTForCausalLM, OPTConfig, _opt),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _gpt()),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _neox),
    "phi3": (Phi3ForCausalLM, Phi3Config, _modern(original_max_position_embeddings=512)),
    "codegen": (CodeGenForCausalLM, CodeGenConfig, _gpt(n_embd=64, rotary_dim=8)),
    "gptj": (GPTJForCausalLM, GPTJConfig, _gpt(n_embd=64, rotary_dim=8)),
    "falcon_rotary": (FalconForCausalLM, FalconConfig, _falcon(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon_alibi": (FalconForCausalLM, FalconConfig, _falcon(new_decoder_architecture=False, alibi=True)),
    "bloom": (BloomForCausalLM, BloomConfig, _bloom),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, _moe),
    "mamba": (MambaForCausalLM, MambaConfig, _mamba),
    "t5": (T5ForConditionalGeneration, T5Config, _t5),
    "t5_gated": (T5ForConditionalGeneration, T5Config, _t5_gated),
    "mt5": (MT5ForConditionalGeneration, MT5Config, _t5),
    "bart": (BartForConditionalGeneration, BartConfig, _bart(tie_word_embeddings=False)),
    "mbart": (MBartForConditionalGeneration, MBartConfig, _bart()),
    "marian": (MarianMTModel, MarianConfig, _bart(scale_embedding=True, tie_word_embeddings=False)),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig, _bart()),
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig, _bart(encoder_no_repeat_ngram_size=0)),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig,
        _bart(num_mel_bins=8, max_source_positions=24, max_target_positions=96, begin_suppress_tokens=None),
    ),
    "moonshine": (MoonshineForConditionalGeneration, MoonshineConfig, _moonshine),
}

GAIN = 2.5  # at 1 a matrix keeps a signal's size; above, layers outweigh embeddings and the whole context counts
SPREAD = 2.5  # standard deviation of the logits over the vocabulary: decided, yet far from one-hot


def tiny_model(family: str, seed: int = 0, *, layers: int = 2, vocab: int = 97, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode, float32, on the CPU, without an end token. Cached: copy it before you change it."""
    key = (family, seed, layers, vocab, repr(sorted(overrides.items())))
    if key not in _built:
        with torch.inference_mode(False):  # it is everybody's, whoever asks first
            _built[key] = _build(family, seed, layers, vocab, overrides)
        _fresh[key] = Fresh(list(_built[key].parameters()))
    return _built[key]


class Fresh:
    """The weights of a model as they were when it was built."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.weights = weights
        self.version = self._version()

    def differs(self, model: PreTrainedModel, replaced: bool) -> bool:
        return self._version() != self.version or (
            replaced and any(a is not b for a, b in zip(model.parameters(), self.weights, strict=True))
        )

    def _version(self) -> int:
        """In-place operations that the weights have seen."""
        return sum(weight._version for weight in self.weights)


_built: dict[Key, PreTrainedModel] = {}
_fresh: dict[Key, Fresh] = {}


def _build(family: str, seed: int, layers: int, vocab: int, overrides: Settings) -> PreTrainedModel:
    model_class, config_class, settings = RECIPES[family]
    fixed: Settings = {"vocab_size": vocab, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = config_class(**{**fixed, **settings(layers), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval().requires_grad_(False)
        roughen(model)
        if family in POST_NORM:
            calm(model)
    if family == "gemma2":  # some versions of transformers forget the soft cap in their SDPA path
        model.set_attn_implementation("eager")
    return model


def roughen(model: PreTrainedModel) -> None:
    """Replace the timid default weights, with which every prompt ends in one repeated token."""
    # A tied head scores the token just read highest; turned round, it scores it low.
    spread = -SPREAD if getattr(model.config, "tie_word_embeddings", False) else SPREAD
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        if weight.dim() == 1:
            weight.add_(0.1 * noise + (spread - 1 if _is_final_norm(name) else 0))
        elif not name.endswith("A_log"):  # a recurrence's decay rates, which no longer decay when random
            weight.copy_(noise * _scale(name, weight.shape))


def calm(model: PreTrainedModel) -> None:
    """Where each sum is normalised anew, what a layer adds drowns the token just read, and one is said for ever."""
    for name, weight in model.named_parameters():
        if ".decoder.layers" in name and name.endswith(("out_proj.weight", "fc2.weight")):
            weight.mul_(0.1 if "encoder_attn" in name else 0.3)


def _scale(name: str, shape: torch.Size) -> float:
    # Embeddings and heads are [tokens, width]; within a layer either side may be the input, and both are of one size.
    return GAIN / math.sqrt(min(shape[-2:])) if _in_layer(name) else 1 / math.sqrt(shape[-1])


def _in_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _is_final_norm(name: str) -> bool:
    return not _in_layer(name) and "embed" not in name and name.endswith(".weight")


def draft_of(model: PreTrainedModel, noise: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A copy with every weight disturbed by `noise` of its tensor's size: it agrees often, not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        size = weight.square().mean().sqrt()
        weight.data.add_(noise * size * torch.randn(weight.shape, generator=generator).to(weight.device))
    return draft


def with_fewer_ids(model: PreTrainedModel, number: int) -> PreTrainedModel:
    """A copy whose embedding and head end at id `number`, as models of one tokenizer are padded differently."""
    fewer = copy.deepcopy(model)
    fewer.resize_token_embeddings(number)
    return fewer.requires_grad_(False)


def ragged_prompts(num: int, vocab: int, seed: int, longest: int = 20) -> list[list[int]]:
    """Random prompts of different lengths as far as `longest` allows: the first has one token, the second `longest`."""
    generator = torch.Generator().manual_seed(seed)
    between = (torch.randperm(max(longest - 2, 1), generator=generator) + 2).tolist()
    lengths = [1, longest, *(between[i % len(between)] for i in range(num - 2))][:num]
    return [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in lengths]


def plain_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The oracle: the new tokens of `model.generate` for one unpadded prompt."""
    check_stock(model)
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return [int(token) for token in out[0, len(prompt) :]]


def check_stock(model: PreTrainedModel) -> None:
    """An oracle must not run through the code it judges."""
    used = model.config._attn_implementation
    assert used in ("eager", "sdpa"), f"the model was left with attention {used!r}, so it is no oracle"


def disturbed_models(replaced: bool = False) -> list[str]:
    """Cached models whose weights or mode a test has changed since they were built.

    With `replaced` they are also searched for weights that are not those of then, which takes twenty times as long.
    """
    return [repr(key) for key, model in _built.items() if model.training or _fresh[key].differs(model, replaced)]
