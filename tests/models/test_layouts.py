"""Packed rows serve models that attend to what they cached; for all others whole rows are laid out, padded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from forerun.errors import UnsupportedModel
from forerun.math.attention import Form
from forerun.models.bodies.modules import ModulesBody
from forerun.models.families import Layout
from forerun.models.scorer import Scorer
from support.census import build, causal_recipes
from support.pinned import needs_pinned_transformers
from support.recompute import check, recomputed
from support.tiny import ragged_prompts, tiny_model

TEXTS = ragged_prompts(3, 97, seed=4, longest=19)


class Changing(LlamaAttention):
    """Llama's attention, but the layer does something between the cache and attention."""

    change_key: float = 1.0
    change_value: float = 1.0
    change_mask: float = 0.0

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.change_key != 1:
            key = key * self.change_key
        if self.change_value != 1:
            value = value * self.change_value
        if self.change_mask and attention_mask is not None:
            attention_mask = attention_mask * self.change_mask
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **others)
        return self.o_proj(out.flatten(2)), weights


def changing_model(**changes: float) -> Any:
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Changing
        layer.self_attn.__dict__.update(changes)
    return model


class PackedOnly(ModulesBody):
    _can_pad = False


class PackedScorer(Scorer):
    _modules_type = PackedOnly


CHANGES = [
    ({"change_key": 2.0}, "Changing changes its keys after"),
    ({"change_value": 0.5}, "Changing changes its values after"),
    ({"change_key": 2.0, "change_value": 0.5}, "Changing changes its keys and values after"),
    ({"change_mask": 0.5}, "Changing changes its attention mask"),
]


def admitted(scorer: Scorer) -> Scorer:
    for row, text in enumerate(TEXTS):
        scorer.admit(row)
        scorer.feed([row], [text[:-1]])
    return scorer


@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_packed_rows_refuse_what_is_not_as_cached(changes: dict[str, float], message: str) -> None:
    scorer = PackedScorer(changing_model(**changes))
    for row in range(2):
        scorer.admit(row)
    with pytest.raises(UnsupportedModel, match=message):  # the second pass has a mask, the first needs none
        for _ in range(2):
            scorer.score([0, 1], TEXTS[:2])
    assert [scorer.length(row) for row in range(2)] == ([0, 0] if "mask" not in message else [1, 19])


@pytest.mark.parametrize("changes", [changes for changes, _ in CHANGES])
def test_padded_rows_take_over(changes: dict[str, float]) -> None:
    """A model that is not known to change its keys is found out in the first pass, and decoded all the same."""
    model = changing_model(**changes)
    scorer = Scorer(model)
    assert scorer.family.layout is Layout.PACKED
    check_rounds(admitted(scorer))
    assert scorer.family.layout is Layout.PADDED


def test_a_model_that_changes_nothing_stays_packed() -> None:
    scorer = admitted(Scorer(changing_model()))
    assert scorer.family.layout is Layout.PACKED
    check_rounds(scorer)


def check_rounds(scorer: Scorer) -> None:
    """Blocks of different lengths, then cut back, thrice: rows stand at different places each time."""
    texts = [list(text) for text in TEXTS]
    for step in range(3):
        blocks = [[text[-1], *range(3, 3 + (row + step) % 3)] for row, text in enumerate(texts)]
        got = scorer.score(range(3), blocks).split([len(block) for block in blocks])
        for row, (text, block) in enumerate(zip(texts, blocks, strict=True)):
            check(got[row], recomputed(scorer.model, [*text, *block[1:]])[-len(block) :])
            text.extend([*block[1 : 1 + step], 50 + step])
            scorer.rewind([row], [min(len(text) - 1, scorer.length(row))])
            scorer.feed([row], [text[scorer.length(row) : -1]])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ("llama", "mistral", "gemma2", "gemma3", "gpt2", "bloom"))
@pytest.mark.parametrize("form", (Form.AUTO, Form.SPLIT))
def test_padded_rows_say_the_same(family: str, form: Form) -> None:
    """Windows, soft caps and learned positions included: every family may be run padded."""
    check_rounds(admitted(Scorer(tiny_model(family), form, layout=Layout.PADDED)))


def test_trees_in_padded_rows() -> None:
    """Two branches in each row, rows of different lengths; then one branch is kept."""
    for family in ("llama", "mistral"):
        scorer = admitted(Scorer(tiny_model(family), layout=Layout.PADDED))
        blocks = [[text[-1], 11, 12, 13, 14] for text in TEXTS]
        trees = [[-1, -1, 0, 1]] * 3  # 11 and 12 follow the text, 13 follows 11, 14 follows 12
        got = scorer.score(range(3), blocks, trees=trees).split(5)
        for row, text in enumerate(TEXTS):
            first, second = (recomputed(scorer.model, [*text, *path])[-3:] for path in ((11, 13), (12, 14)))
            check(got[row], torch.stack([first[0], first[1], second[1], first[2], second[2]]))
            scorer.keep(row, len(text), [1, 3])
        after = scorer.score(range(3), [[20]] * 3)
        for row, text in enumerate(TEXTS):
            check(after[row], recomputed(scorer.model, [*text, 12, 14, 20])[-1])


def test_twins_are_copied_in_padded_rows() -> None:
    scorer = Scorer(changing_model(change_key=2.0))
    for row in range(3):
        scorer.admit(row)
    scorer.feed(range(3), [TEXTS[1], TEXTS[2], TEXTS[1]])
    logits = scorer.score(range(3), [[4], [5], [6]])
    for row, text in enumerate(([*TEXTS[1], 4], [*TEXTS[2], 5], [*TEXTS[1], 6])):
        check(logits[row], recomputed(scorer.model, text)[-1])


def test_keys_that_are_the_same_for_several_heads_are_kept_once() -> None:
    """Falcon's second architecture caches a key once for every query head; its text is tested with all families'."""
    model = tiny_model("falcon_rotary")
    scorer = Scorer(model)
    assert scorer.family.key_copies == model.config.num_attention_heads // model.config.num_kv_heads > 1
    scorer.admit(0)
    check(scorer.score([0], [TEXTS[0]]), recomputed(model, TEXTS[0]))
    assert scorer.cache.layers[0].keys.shape[2] == model.config.num_kv_heads


@needs_pinned_transformers
def test_layers_that_count_positions_are_refused_in_padded_rows() -> None:
    """Llama 4 scales queries by positions that it counts itself: one number for all rows there."""
    recipe = next(r for r in causal_recipes() if r.name == "llama4_text")
    scorer = Scorer(build(recipe), layout=Layout.PADDED)
    for row in range(2):
        scorer.admit(row)
    scorer.score([0], [TEXTS[1]])
    with pytest.raises(UnsupportedModel, match="layer 1 of the model counts positions from the length of the cache"):
        scorer.score([0, 1], TEXTS[:2])
