"""What a configuration tells of a token's keys and values, beside what the cache holds of them."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from forerun import SpeculativeDecoder
from forerun.cache.paged import PagedCache
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.scaled import FP8
from forerun.models import cache_size
from forerun.models.cache_size import bytes_per_token
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source
from support.census import Recipe, build, causal_recipes
from support.described import NAMES, described_model
from support.pinned import needs_pinned_transformers
from support.tiny import tiny_model


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.quick("falcon", "falcon-grouped", "gpt_bigcode", "deepseek_v3", "mpt", "llama")
def test_a_token_takes_what_the_configuration_tells(family: str) -> None:
    _compare(described_model(family))


@needs_pinned_transformers
def test_layers_with_heads_of_their_own() -> None:
    """Gemma 4's full attention has fewer and wider heads than its windows, of which no one number tells."""
    known = next(recipe for recipe in causal_recipes() if recipe.name == "gemma4_text")
    full = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_key_value_heads": 2}
    model: Any = build(Recipe(known.name, known.class_name, {**known.overrides, **full, "head_dim": 16}))
    assert {(one.head_dim, one.num_key_value_heads) for one in model.config.per_layer_config} == {(16, 2), (32, 1)}
    assert cache_size.key_heads(model.config) == 1
    _compare(model)


def test_an_encoder_may_have_other_layers_than_its_decoder() -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=3, d_ff=16, vocab_size=20, num_layers=5, num_decoder_layers=2)
    model: Any = T5ForConditionalGeneration(config)
    assert bytes_per_token(model) == 2 * 2 * 3 * 4 * 4  # keys and values, layers, heads, numbers, bytes


def _compare(model: Any) -> None:
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.admit(0)
    scorer.feed([0], [[1, 2, 3]])
    pools = list(chain.from_iterable((layer.keys, layer.values) for layer in scorer.cache.layers.values()))
    assert pools
    assert bytes_per_token(model) == sum(pool.shape[-2:].numel() * pool.element_size() for pool in pools)


def test_keys_of_8_bit_floats_need_a_gpu_that_converts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size.ops, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(cache_size, "keeps_latents", lambda _: False)
    monkeypatch.setattr(cache_size, "PagedCache", lambda tokens, *_, scheme, **__: (tokens, scheme))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    model: Any = SimpleNamespace(device=torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(InvalidArgument, match=r"cache_dtype='fp8' needs compute capability 8.9, an A100.*use 'int8'"):
        cache_size.new_cache(model, 64, Kernels.AUTO, None, scheme=FP8)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert cache_size.new_cache(model, 64, Kernels.AUTO, None, scheme=FP8) == (64, FP8)  # type: ignore[comparison-overlap]


def test_an_encoder_decoder_models_keys_are_rounded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds, through the decoder's argument, as on a GPU."""
    model, source = tiny_model("bart"), [[5, 6, 7, 8]]
    with pytest.raises(InvalidArgument, match="cache_dtype='int8' needs Triton kernels on a GPU: the model is on cpu"):
        SpeculativeDecoder(model, None, cache_dtype="int8").generate(source, max_new_tokens=2)
    monkeypatch.setattr("forerun.models.scorer.new_cache", _in_blocks)
    target = SpeculativeDecoder(model, None, cache_dtype="int8").engine.target
    assert isinstance(target, Seq2SeqScorer)
    target.admit(0)
    target.read(0, Source(ids=(5, 6, 7)))
    target.score([0], [[2]])
    for cache in (target.cache, target.sources.cache):
        assert len(cache.layers) == 2
        assert all(
            isinstance(pool, ScaledKeys) for layer in cache.layers.values() for pool in (layer.keys, layer.values)
        )


def _in_blocks(model: Any, tokens: Any, use: Any, longest: Any, agreed: Any, scheme: Any) -> PagedCache:
    return PagedCache(64, model.device, longest=longest, block_size=8, scheme=scheme)
