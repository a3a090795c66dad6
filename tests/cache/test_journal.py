"""A cache that repeats the changes of another is in the same state, whatever rows came, grew, shared and went."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch

from forerun.cache.base import CacheFull, KeyValueCache
from forerun.cache.journal import CacheJournal, change
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache

CHANGING = {
    "admit", "begin", "clear", "copy", "extend", "forget", "give_back", "keep", "release", "remember", "reserve",
    "reserve_slots", "rewind", "set_length",
}  # fmt: skip
# What leaves rows, slots, lengths and blocks as they are. `move`, `layer` and `write` are a pass's own doing.
READING = {
    "addresses", "beside", "digest", "for_sources", "has_room", "keys_of_source", "keys_to_read", "layer", "length",
    "locate", "move", "needs", "num_bytes", "read", "replay", "slot", "takes", "write",
}  # fmt: skip
KINDS: dict[str, Callable[[], KeyValueCache]] = {
    "ragged": RaggedCache,
    "bounded": lambda: RaggedCache(400),
    "paged": lambda: PagedCache(400, torch.device("cpu"), block_size=8),
}


def test_every_method_is_one_or_the_other() -> None:
    methods = {name for name, _ in inspect.getmembers(KeyValueCache, inspect.isfunction) if not name.startswith("_")}
    assert methods == CHANGING | READING
    assert not CHANGING & READING


@pytest.mark.parametrize("kind", [RaggedCache, PagedCache])
def test_changing_methods_are_noted_and_no_others(kind: type[KeyValueCache]) -> None:
    noted = change(KeyValueCache.release).__code__  # type: ignore[attr-defined]
    methods = {name: getattr(kind, name).__code__ for name in CHANGING | READING}
    assert {name for name, code in methods.items() if code is noted} == CHANGING


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_cache_is_in_the_same_state(kind: str) -> None:
    ours, theirs = KINDS[kind](), KINDS[kind]()
    journal, draws, number = _noted(ours), random.Random(0), 0
    texts: dict[int, list[int]] = {}
    num_full = 0
    for step in range(300):
        act = draws.choice(("admit", "extend", "extend", "rewind", "keep", "copy", "release", "remember"))
        row = draws.choice(list(texts)) if texts else None
        try:
            if act == "admit" or row is None:
                ours.admit(number)
                texts[number] = draws.choice(([1] * 30, [2] * 17, [1] * 20 + [3]))
                ours.begin(number, texts[number])
                number += 1
            elif act == "extend":
                ours.extend([row], [draws.randint(1, 20)])
            elif act == "rewind":
                ours.rewind(row, draws.randint(0, ours.length(row)))
            elif act == "keep" and ours.length(row) > 4:
                ours.keep(row, ours.length(row) - 4, (0, 2))
            elif act == "copy" and ours.length(row):
                ours.admit(number)
                texts[number] = texts[row]
                ours.copy(row, number, draws.randint(1, ours.length(row)))
                number += 1
            elif act == "remember":
                ours.remember(row, texts[row][: ours.length(row)])
            elif act == "release":
                ours.release(row)
                del texts[row]
        except CacheFull:
            num_full += 1
            ours.release(row)  # type: ignore[arg-type]
            del texts[row]  # type: ignore[arg-type]
        if step % 7 == 0:
            theirs.replay(journal.take())
            assert ours.digest() == theirs.digest(), step
    assert texts and (num_full > 0) is (kind != "ragged")
    theirs.rewind(next(iter(texts)), 0)
    ours.extend([next(iter(texts))], [1])
    assert ours.digest() != theirs.digest(), "a state that differs is not noticed"


def test_what_was_given_is_noted_not_what_became_of_it() -> None:
    cache = PagedCache(400, torch.device("cpu"), block_size=8)
    journal, text = _noted(cache), [1, 2, 3]
    cache.admit(0)
    cache.begin(0, text)
    text.append(4)
    assert ("begin", (0, (1, 2, 3)), {}) in journal.take()


def _noted(cache: KeyValueCache) -> CacheJournal:
    cache.journal = CacheJournal()
    return cache.journal
