"""Every family whose layers are described, built small: what fused bodies are held against, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.models.scorer import Scorer
from support.census import Recipe, build

# Frequencies that switch behind all that is fed here and long before a table of angles ends.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0],
             "long_factor": [4.0, 5.0, 6.0, 7.0], "original_max_position_embeddings": 128}  # fmt: skip
HALF_A_HEAD = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# Every family that is described, and what its small configuration needs for all of the description to be seen.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
    "qwen3": {},
    "arcee": {"mlp_bias": True},
    "axk1": {},
    "bloom": {},
    "codegen": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "cwm": {},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {"use_bias": True},
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {},
    "dots1": {},
    "exaone4": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "bias": True},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3_text": {"final_logit_softcapping": 10.0},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"use_parallel_residual": False, "rope_parameters": HALF_A_HEAD},
    "gpt_oss": {},
    "gptj": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
                "attention_multiplier": 0.3},
    "granitemoe": {"residual_multiplier": 0.4},
    "helium": {},
    "hyperclovax": {"use_post_norm": True, "logits_scaling": 0.5, "residual_multiplier": 0.4},
    "jais2": {},
    "longcat_flash": {},
    "minicpm3": {"scale_depth": 1.4, "dim_model_base": 8},
    "minimax_m2": {"rope_parameters": HALF_A_HEAD},
    "ministral": {},
    "mixtral": {},
    "mpt": {},
    "nemotron": {},
    "olmo": {"clip_qkv": None},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"clip_qkv": None},
    "opt": {},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {},
    "stablelm": {"use_qkv_bias": True, "rope_parameters": HALF_A_HEAD},
    "starcoder2": {},
    "vaultgemma": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "youtu": {"attention_bias": True},
}  # fmt: skip
# The same families built in another way.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-sequential": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4,
                                     "parallel_attn": False}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True}),
    "falcon-grouped-one-norm": ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
                                           "bias": True}),
    "gemma3-with-images": ("gemma3", {}),
    "gpt_bigcode-many-keys": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox-parallel": ("gpt_neox", {"use_parallel_residual": True, "rope_parameters": HALF_A_HEAD}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "phi3-long": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128}),
    "phi3-partial": ("phi3", {"rope_parameters": HALF_A_HEAD}),
}  # fmt: skip
NAMES = (*FAMILIES, *VARIANTS)
TEXTS = ([5, 11, 3, 60, 7, 7, 21, 40, 2, 19, 33, 9], [8, 90, 4])
NEW = ([31, 6, 17], [44])


def described_model(name: str, **changes: Any) -> PreTrainedModel:
    """In float32 on the CPU."""
    kind, settings = VARIANTS.get(name) or (name, FAMILIES[name])
    model = build(Recipe(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], settings | changes)).float()
    if kind == "granitemoe" and not _answers_with_logits_first(model.base_model.layers[0].block_sparse_moe.router):
        pytest.skip("this version of transformers has another router, which is refused")
    for name, buffer in model.named_buffers():  # zeros would say nothing of who reads them
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).flip(0))
    if "attn_logit_softcapping" in settings:  # which older versions of transformers leave out with SDPA
        model.set_attn_implementation("eager")
    return model


def _answers_with_logits_first(router: Any) -> bool:
    answer: Tensor = router(torch.zeros(1, router.weight.shape[-1]))[0]
    return answer.is_floating_point()


def feed(scorer: Scorer) -> None:
    """Both texts in two parts, with tokens between them that are taken back."""
    for row, text in enumerate(TEXTS):
        scorer.admit(row)
        scorer.feed([row], [[*text[:2], 1, 2, 3]])
        scorer.rewind([row], [2])
        scorer.feed([row], [text[2:]])


@torch.no_grad()
def expected(model: PreTrainedModel) -> list[Tensor]:
    """The model's own logits after each of `NEW`, behind `TEXTS`."""
    texts = [torch.tensor([[*text, *new]], device=model.device) for text, new in zip(TEXTS, NEW, strict=True)]
    return [model(text, use_cache=False).logits[0][-len(new) :] for text, new in zip(texts, NEW, strict=True)]
