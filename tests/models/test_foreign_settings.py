"""A configuration keeps every key that config.json has. Fused layers heed those that the family's own modules heed."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.census import Recipe, build
from support.described import FAMILIES, NEW, described_model, expected, feed
from support.recompute import check

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.models.bodies import choose
from forerun.models.scorer import Scorer

# What some family heeds, with a value that nobody could overlook.
SETTINGS: dict[str, Any] = {
    # of scores and logits
    "logits_scaling": 8.0, "logit_scale": 8.0, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5,
    "attention_multiplier": 2.0, "query_pre_attn_scalar": 1024, "scale_attn_by_inverse_layer_idx": True,
    "clip_qkv": 0.05, "alibi": True,
    # of hidden states
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "scale_emb": 7, "scale_depth": 3.0, "dim_model_base": 4,
    "use_parallel_residual": True, "parallel_attn": True, "apply_residual_connection_post_layernorm": True,
    "use_post_norm": True, "do_layer_norm_before": False,
    # of heads and what they see
    "sliding_window": 2, "window_size": 2, "use_bidirectional_attention": True, "use_qk_norm": True,
    "qk_layernorm": True, "multi_query": True, "num_key_value_heads": 1,
    # of positions
    "rotary_dim": 2, "rope_interleave": True, "no_rope_layers": [0, 1],
    # of experts
    "norm_topk_prob": True, "routed_scaling_factor": 4.0, "n_group": 2, "topk_group": 1, "swiglu_limit": 0.5,
}  # fmt: skip
# What transformers itself reads, of any family.
COMMON: dict[str, Any] = {
    "partial_rotary_factor": 0.5, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip


def foreign(family: str) -> dict[str, Any]:
    """Those settings that the family's configuration knows nothing of."""
    config = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]).config_class()
    return {name: value for name, value in SETTINGS.items() if not hasattr(config, name)}


def built(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    described_model(family)  # skips what this version of transformers does not describe
    both = {**FAMILIES[family], **settings}
    model = build(Recipe(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], both)).float()
    if "attn_logit_softcapping" in both:
        model.set_attn_implementation("eager")
    return model


def check_fused(model: PreTrainedModel, want: list[Tensor]) -> bool:
    """Whether the model is fused, and then its logits are its own modules'."""
    try:
        scorer = Scorer(model, use=Kernels.ON)
    except UnsupportedModel:
        return False
    if not scorer.is_fused:
        return False
    feed(scorer)
    for own, right in zip(scorer.score([0, 1], NEW).split([len(new) for new in NEW]), want, strict=True):
        check(own, right)
    return True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite", "gpt2", "deepseek_v3")
def test_settings_of_other_families_change_nothing(family: str) -> None:
    settings = foreign(family)
    model = built(family, settings)
    assert settings.items() <= vars(model.config).items() and len(settings) > len(SETTINGS) / 2, "control"
    assert check_fused(model, expected(model)), choose.why_not(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("gemma3_text", "glm4_moe_lite")
def test_settings_of_the_family_are_heeded_or_refused(family: str) -> None:
    """One at a time, where transformers can run the family with it."""
    own = {name: value for name, value in (SETTINGS | COMMON).items() if name not in foreign(family)}
    tried = 0
    for name, value in own.items():
        try:
            model = built(family, {name: value})
            want = expected(model)
        except (AttributeError, ValueError, RuntimeError, StrictDataclassError):
            continue
        tried += 1
        assert check_fused(model, want) or choose.why_not(model), name
    assert tried, "control"
