"""What tests of memory share: small caches, and looks at what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.cache.base import KeyValueCache
from forerun.cache.blocks import BlockPool
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.engine import Engine

SIZE = 8


def paged(num_tokens: int) -> PagedCache:
    return PagedCache(num_tokens, torch.device("cpu"), block_size=SIZE)


def caches_of(made: Engine) -> list[KeyValueCache]:
    """Those of target and drafter, and of what their encoders have read."""
    own = made.pair.caches
    return [*own, *(cache.sources.cache for cache in own if cache.sources is not None)]


def check_blocks(made: Engine) -> None:
    """Every block is free, findable or held as often as it is counted, in the caches of target and drafter."""
    for cache in made.pair.caches:
        if isinstance(cache, PagedCache):
            cache.check()


def check_nothing_is_held(made: Engine) -> None:
    check_blocks(made)
    for cache in caches_of(made):
        assert cache.rows == ()
        if isinstance(cache, PagedCache):
            assert cache.num_used == cache.pool.num_findable == 0


def watched_memory(patch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that rows and what they read hold memory for, after every change of it."""
    seen, resize = [0], RaggedCache._set_size

    def resized(cache: RaggedCache, *given: int) -> None:
        resize(cache, *given)
        seen.append(sum(each.memory for each in cache._sharing))

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(pool: BlockPool, *given: int) -> Any:
            found = method(pool, *given)
            seen.append((pool.num_blocks - pool.num_available) * pool.size)
            return found

        return call

    patch.setattr(RaggedCache, "_set_size", resized)
    for name in ("take", "hold"):
        patch.setattr(BlockPool, name, counted(getattr(BlockPool, name)))
    return seen
