"""Families in the sizes of published models, with random weights: 8 layers on a GPU, whole small models on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Settings = dict[str, Any]
LAYERS = 8


def _shape(hidden: int, inner: int, heads: int, key_heads: int, vocab: int, **more: Any) -> Settings:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocab, **more,
    }  # fmt: skip


# Llama 2 7B, Qwen2 7B, Qwen3 8B, Gemma 2 9B, Gemma 3 4B, OPT 6.7B, StarCoder2 7B, Pythia 6.9B, OLMo 2 7B, Granite 3
# 8B, Phi-3 mini, CodeGen 6B, Command R7B, GLM-4 9B, StableLM 2 12B, Falcon 7B, GPT-J 6B, SmolLM3 3B, Phi-2, BLOOM
# 7B1, EXAONE 4 32B's width, Nemotron 3 8B, Helium 2B, Arcee AFM 4.5B, Seed-OSS 36B's width, OLMo 3 7B, Gemma 7B,
# Command R's width, GPT-2 XL; then experts: Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-20b, DeepSeek-V3 with 32 of its 256,
# Qwen1.5-MoE-A2.7B, OLMoE 1B-7B, Granite 3 3B-A800M, GLM-4.5-Air, DeepSeek-V2-Lite.
ON_GPU: dict[str, Settings] = {
    "llama": _shape(4096, 11008, 32, 32, 32000),
    "qwen2": _shape(3584, 18944, 28, 4, 152064),
    "qwen3": _shape(4096, 12288, 32, 8, 151936, head_dim=128),
    "gemma2": _shape(3584, 14336, 16, 8, 256000, head_dim=256),
    "gemma3_text": _shape(2560, 10240, 8, 4, 262208, head_dim=256),
    "opt": {"hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384, "num_attention_heads": 32,
            "vocab_size": 50272},
    "starcoder2": _shape(4608, 18432, 36, 4, 49152, sliding_window=4096),
    "gpt_neox": _shape(4096, 16384, 32, 32, 50432),
    "olmo2": _shape(4096, 11008, 32, 32, 100352),
    "granite": _shape(4096, 12800, 32, 8, 49159),
    "phi3": _shape(3072, 8192, 32, 32, 32064, sliding_window=2047),
    "codegen": {"n_embd": 4096, "n_head": 16, "rotary_dim": 64, "vocab_size": 51200},
    "cohere2": _shape(4096, 14336, 32, 8, 256000),
    "glm4": _shape(4096, 13696, 32, 2, 151552, head_dim=128),
    "stablelm": _shape(5120, 13824, 32, 8, 100352, use_parallel_residual=True),
    "falcon": {"hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024},
    "gptj": {"n_embd": 4096, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400},
    "smollm3": _shape(2048, 11008, 16, 4, 128256),
    "phi": _shape(2560, 10240, 32, 32, 51200, partial_rotary_factor=0.4),
    "bloom": {"hidden_size": 4096, "n_head": 32, "vocab_size": 250880},
    "exaone4": _shape(5120, 27392, 40, 8, 102400, head_dim=128),
    "nemotron": _shape(4096, 16384, 32, 32, 256000),
    "helium": _shape(2560, 7040, 20, 20, 48000, head_dim=128),
    "arcee": _shape(2560, 18432, 20, 4, 128004, head_dim=128),
    "seed_oss": _shape(5120, 27648, 80, 8, 155136, head_dim=128),
    "olmo3": _shape(4096, 11008, 32, 32, 100278),
    "gemma": _shape(3072, 24576, 16, 16, 256000, head_dim=256),
    "cohere": _shape(8192, 22528, 64, 64, 256000),
    "gpt2": {"n_embd": 1600, "n_head": 25, "vocab_size": 50257},
    "qwen3_moe": _shape(2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                        moe_intermediate_size=768),
    "mixtral": _shape(4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": _shape(2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    "deepseek_v3": _shape(7168, 18432, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=32,
                          n_group=8, topk_group=4),
    "qwen2_moe": _shape(2048, 5632, 16, 16, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                        shared_expert_intermediate_size=5632),
    "olmoe": _shape(2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    "granitemoe": _shape(1536, 512, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8),
    "glm4_moe": _shape(4096, 10944, 96, 8, 151552, head_dim=128, moe_intermediate_size=1408, n_routed_experts=128,
                       num_experts_per_tok=8, first_k_dense_replace=1, partial_rotary_factor=0.5),
    "deepseek_v2": _shape(2048, 10944, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64,
                          num_experts_per_tok=6, n_shared_experts=2, kv_lora_rank=512, q_lora_rank=None,
                          qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1),
}  # fmt: skip


def _small(key_heads: int = 3, **more: Any) -> Settings:
    """SmolLM2-135M's sizes, for families that nobody has published at a width of 576 to 1024."""
    return _shape(576, 1536, 9, key_heads, 49152, num_hidden_layers=30, head_dim=64, **more)


# SmolLM2 135M, OPT 125M, GPT-2, GPT-Neo 125M, Tiny StarCoder, Gemma 3 270M, CodeGen 350M, Pythia 410M, ERNIE 4.5 0.3B,
# Qwen2 0.5B, BLOOM 560M, Qwen3 0.6B: sizes as published.
ON_CPU: dict[str, Settings] = {
    "llama": _small(),
    "mistral": _small(),
    "smollm3": _small(),
    "starcoder2": _small(),
    "phi3": _small(9),
    "stablelm": _small(9),
    "olmo2": _small(9),
    "granite": _small(),
    "cohere2": _small(),
    "gemma2": _small(),
    "phi": _small(9),
    "gemma": _small(),
    "glm4": _small(),
    "olmo3": _small(9),
    "exaone4": _small(),
    "helium": _small(),
    "arcee": _small(),
    "seed_oss": _small(),
    "ministral": _small(),
    "opt": {"hidden_size": 768, "word_embed_proj_dim": 768, "ffn_dim": 3072, "num_attention_heads": 12,
            "num_hidden_layers": 12, "vocab_size": 50272},
    "gpt2": {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
    "gpt_neo": {"hidden_size": 768, "num_heads": 12, "num_hidden_layers": 12, "vocab_size": 50257,
                "attention_types": [[["global", "local"], 6]]},
    "gpt_bigcode": {"n_embd": 768, "n_head": 12, "n_layer": 20, "n_inner": 3072, "vocab_size": 49152},
    "gemma3_text": _shape(640, 2048, 4, 1, 262144, num_hidden_layers=18, head_dim=256),
    "codegen": {"n_embd": 1024, "n_head": 16, "n_layer": 20, "rotary_dim": 32, "vocab_size": 51200},
    "gpt_neox": _shape(1024, 4096, 16, 16, 50304, num_hidden_layers=24, rotary_pct=0.25),
    "ernie4_5": _shape(1024, 3072, 16, 2, 103424, num_hidden_layers=18, head_dim=128),
    "qwen2": _shape(896, 4864, 14, 2, 151936, num_hidden_layers=24),
    "bloom": {"hidden_size": 1024, "n_head": 16, "num_hidden_layers": 24, "vocab_size": 250880},
    "qwen3": _shape(1024, 3072, 16, 8, 151936, num_hidden_layers=28, head_dim=128),
}  # fmt: skip
OWN_NAMES = {"codegen", "gptj", "gpt2", "gpt_bigcode"}  # configurations with names of their own for sizes


def build(kind: str, device: torch.device, context: int = 2048) -> PreTrainedModel:
    """A random model of one family: in bfloat16 on a GPU, in float32 elsewhere."""
    is_gpu = device.type == "cuda"
    options, dtype = (ON_GPU if is_gpu else ON_CPU)[kind], torch.bfloat16 if is_gpu else torch.float32
    layers, positions = ("n_layer", "n_positions") if kind in OWN_NAMES else (
        "num_hidden_layers", "max_position_embeddings"
    )  # fmt: skip
    settings = {layers: LAYERS, positions: context, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    settings |= options
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            # Some versions of transformers leave soft caps out of SDPA without a word.
            attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.to(device, dtype).eval().requires_grad_(False)
