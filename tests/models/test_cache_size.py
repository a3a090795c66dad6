"""What a configuration tells of a token's keys and values, beside what the cache holds of them."""

from __future__ import annotations

from itertools import chain

import pytest

from forerun.config import Kernels
from forerun.models.cache_size import bytes_per_token
from forerun.models.scorer import Scorer
from support.described import NAMES, described_model


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.quick("falcon", "falcon-grouped", "gpt_bigcode", "deepseek_v3", "mpt", "llama")
def test_a_token_takes_what_the_configuration_tells(family: str) -> None:
    model = described_model(family)
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.admit(0)
    scorer.feed([0], [[1, 2, 3]])
    pools = list(chain.from_iterable((layer.keys, layer.values) for layer in scorer.cache.layers.values()))
    assert pools
    assert bytes_per_token(model) == sum(pool.shape[-2:].numel() * pool.element_size() for pool in pools)
