"""A decoder that nobody holds any more gives its memory back at once: a GPU's allocator asks no garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from forerun import SpeculativeDecoder
from forerun.drafters import Chain, DraftModel, EarlyExit, PromptLookup, RandomDraft, SelfDraft, Tree
from forerun.drafters.base import Drafter
from support.devices import GPU
from support.tiny import tiny_model

DRAFTERS: dict[str, Callable[[str], Drafter | None]] = {
    "none": lambda device: None,
    "model": lambda device: DraftModel(tiny_model("llama").to(device)),
    "lookup": lambda device: PromptLookup(),
    "chain": lambda device: Chain(PromptLookup(), DraftModel(tiny_model("llama").to(device))),
    "early exit": lambda device: EarlyExit(1),
    "tree": lambda device: Tree(DraftModel(tiny_model("llama").to(device)), nodes=6),
    "random": lambda device: RandomDraft(),
    "copy": lambda device: SelfDraft(8),
}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.quick(every=3)
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_cycle_keeps_keys_and_recordings(drafter: str, device: str) -> None:
    target = tiny_model("llama").to(device)
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](device), policy=3)
    decoder.generate([[1, 2, 3, 4], [5, 6]], max_new_tokens=8, do_sample=True, seed=1)
    engine = decoder.engine
    parts = [engine, engine.target, engine.target.cache, engine.runner, decoder.drafter]
    left = {type(part).__name__: weakref.ref(part) for part in parts if part is not None}
    del decoder, engine, parts
    assert [name for name, part in left.items() if part() is not None] == []
