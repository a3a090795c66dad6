"""What is held, and for how long."""

from __future__ import annotations

import gc

import pytest
import torch

from forerun import DraftModel, PromptLookup, SpeculativeDecoder
from support.tiny import draft_of, tiny_model

VOCAB, ROWS, LENGTH = 3001, 4, 4


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new() -> None:
    """What earlier tests left is not looked through, again and again."""
    gc.collect()
    gc.freeze()


def big_tensors(at_least: int) -> list[torch.Size]:
    """Float tensors of that size that are alive, the models' own weights apart (they have no vocabulary axis last)."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.is_floating_point()]
    return [t.shape for t in tensors if t.numel() >= at_least and t.shape[-1] == VOCAB]


def test_no_law_of_the_whole_draft_outlives_its_round() -> None:
    target = tiny_model("llama", vocab=VOCAB)
    decoder = SpeculativeDecoder(target, DraftModel(draft_of(target)), policy=LENGTH)
    prompts = torch.randint(1, VOCAB, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    rounds = 0
    for _ in decoder.stream(prompts, max_new_tokens=24, temperature=0.8, seed=1):
        rounds += 1
        assert big_tensors(ROWS * LENGTH * VOCAB) == []
    assert rounds > 3


def test_the_search_for_big_tensors_finds_one() -> None:
    held = torch.zeros(ROWS, LENGTH, VOCAB)
    assert big_tensors(ROWS * LENGTH * VOCAB) == [held.shape]


def test_the_cache_holds_what_the_rows_hold() -> None:
    target = tiny_model("llama")
    decoder = SpeculativeDecoder(target, PromptLookup(), policy=4)
    prompts = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    out = decoder.generate(prompts, max_new_tokens=60)
    cache, config = decoder.engine.target.cache, target.config
    longest = out.sequences.shape[1]
    assert cache.num_slots == 3
    assert cache.capacity <= 1.5 * longest + 64
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cache.num_bytes() == cache.num_slots * cache.capacity * per_token
    again = decoder.generate(prompts, max_new_tokens=60)
    assert again.new_tokens == out.new_tokens
    assert cache.num_slots == 3  # released rows are used again
