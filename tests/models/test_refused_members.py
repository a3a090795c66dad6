"""Published members of described families that the description has no words for: refused by name, never misread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.models.bodies import readers
from support.census import Recipe, build
from support.described import FAMILIES, LONG_ROPE, described_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
# Most are named on docs/fused-layers.md: what differs from the members that are described, and the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "StableLM 2 12B": ("stablelm", {"qk_layernorm": True}, "a norm of its own for every head"),
    "OLMo 7B 0424": ("olmo", {"clip_qkv": 8.0}, "clipped at 8.0"),
    "OLMoE that clips": ("olmoe", {"clip_qkv": 8.0}, "clipped at 8.0"),
    "MPT-7B-StoryWriter": ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clipped at 6.0"),
    "Falcon-RW": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}, "ALiBi"),
    "OPT-350M": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}, "embeddings of another width"),
    "Llama with dynamic RoPE": ("llama", {"rope_parameters": DYNAMIC}, "of type dynamic"),
}  # fmt: skip


@pytest.mark.parametrize("member", REFUSED)
def test_refused(member: str) -> None:
    family, settings, reason = REFUSED[member]
    model = build(Recipe(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], FAMILIES[family] | settings)).float()
    assert reason in (readers.why_not(model) or "")
    assert readers.why_not(described_model(family)) is None, "control: the member that is described"


def test_long_rope_turns_by_short_factors_as_far_as_texts_go() -> None:
    """A table may be longer than that, as a cache is; asked for it at once, the modules would turn by the long ones."""
    model, end = described_model("phi3-long"), LONG_ROPE["original_max_position_embeddings"]
    like, before = torch.zeros(1), model.model.rotary_emb.inv_freq
    (table,) = readers.describe(model).tables
    got = table(2 * end)
    assert len(got) == 2 * end and model.model.rotary_emb.inv_freq is before, "no changed model"
    short, long = (
        torch.cat(model.model.rotary_emb(like, torch.arange(count)[None]), dim=-1)[0] for count in (end, end + 1)
    )
    assert torch.equal(got[:end], short) and not torch.allclose(long[:end], short)
