"""Rows that come, go, grow, move and are cut back never see each other's keys, nor their own past mistakes."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from forerun.cache.base import CacheFull, KeyValueCache, NewRow, ranges
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import GRAIN, RaggedCache
from forerun.math.attention import Form
from forerun.models.scorer import Scorer
from forerun.types import RaggedRows
from support.recompute import check, recomputed
from support.tiny import ragged_prompts, tiny_model

VOCAB = 97
# Packed with full rows, packed with sliding windows, padded with a mask, padded with ALiBi.
KINDS = ("llama", "mistral", "codegen", "bloom")


def cache_of(kind: str, num_tokens: int = 1024) -> KeyValueCache:
    """Blocks that are so small that every row has several."""
    if kind == "paged":
        return PagedCache(num_tokens, torch.device("cpu"), block_size=8)
    return RaggedCache()


@torch.inference_mode()
def poison(scorer: Scorer, spoilt: dict[int, slice], value: float) -> None:
    """Overwrite keys and values of every layer wherever no row has keys, and at these positions of rows."""
    cache = scorer.cache
    free = torch.ones(next(iter(cache.layers.values())).flat[0].shape[0], dtype=torch.bool)
    for row in cache.rows:
        kept = torch.zeros(cache.length(row), dtype=torch.bool)
        kept[spoilt.get(row, slice(0, 0))] = True
        rows = RaggedRows((cache.slot(row),), (0,), (cache.length(row),))
        free[cache.addresses(rows)] = kept
    for layer in cache.layers.values():
        for pool in layer.flat:
            pool[free] = value


def filled(family: str, form: Form = Form.AUTO, rows: int = 4, kind: str = "ragged") -> tuple[Scorer, list[list[int]]]:
    """A scorer that has taken in ragged texts, one a row."""
    texts = ragged_prompts(rows, VOCAB, seed=3, longest=30)
    scorer = Scorer(tiny_model(family), form, cache_of(kind))
    for row in range(rows):
        scorer.admit(row)
    scorer.feed(range(rows), texts)
    return scorer, texts


@functools.cache
def fresh(model: Any, *tokens: int) -> torch.Tensor:
    """Logits of a whole pass; most tests here ask for those of the same texts."""
    return recomputed(model, list(tokens))


def check_rows(scorer: Scorer, texts: dict[int, list[int]], new: tuple[int, ...] = (5, 6, 7)) -> None:
    """Every row continues as a fresh computation does; rows are left as they were."""
    order = sorted(texts, key=scorer.cache.slot)
    logits = scorer.score(order, [list(new)] * len(order)).split(len(new))
    for row, own in zip(order, logits, strict=True):
        check(own, fresh(scorer.model, *texts[row], *new)[-len(new) :])
        scorer.rewind([row], [len(texts[row])])


CACHES = ("ragged", "paged")
FORMS = [(family, form) for family in KINDS for form in (Form.PAD, Form.SPLIT)]


SCHEDULES = [
    ("llama", Form.PAD),
    ("llama", Form.SPLIT),
    ("mistral", Form.PAD),
    ("mistral", Form.SPLIT),
    ("codegen", Form.AUTO),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
def test_a_short_schedule_of_accepted_counts(kind: str) -> None:
    check_schedule("mistral", Form.SPLIT, kind, rounds=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("family", "form"), SCHEDULES)
def test_random_schedule_of_accepted_counts(family: str, form: Form, kind: str) -> None:
    check_schedule(family, form, kind, rounds=200)


def check_schedule(family: str, form: Form, kind: str, rounds: int) -> None:
    """Rounds of drafts and cuts: each row's logits are those of the row alone and of full recomputes."""
    model = tiny_model(family, **{"n_positions" if family == "codegen" else "max_position_embeddings": 2048})
    plan = random.Random(f"{family} {form}")
    texts = ragged_prompts(4, VOCAB, seed=5)
    together, alone = Scorer(model, form, cache_of(kind, 8192)), [Scorer(model) for _ in texts]
    for row, text in enumerate(texts):
        together.admit(row)
        alone[row].admit(0)
        alone[row].feed([0], [text])
    together.feed(range(4), texts)
    for step in range(rounds):
        blocks = [[plan.randrange(VOCAB) for _ in range(plan.randint(1, 5))] for _ in texts]
        logits = together.score(range(4), blocks).split([len(block) for block in blocks])
        for row, (text, block) in enumerate(zip(texts, blocks, strict=True)):
            check(logits[row], alone[row].score([0], [block]))
            if step % 20 == row:
                check(logits[row], recomputed(model, [*text, *block])[len(text) :])
            text.extend(block[: plan.randint(1, len(block))])
            together.rewind([row], [len(text)])
            alone[row].rewind([0], [len(text)])
    assert min(map(len, texts)) > 1.5 * rounds


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize(("kind", "value"), (("ragged", 1e4), ("paged", 1e4), ("paged", torch.nan)))
def test_garbage_beyond_a_rows_keys_is_never_read(family: str, form: Form, kind: str, value: float) -> None:
    """Rows in one piece multiply what lies there with nothing, so it must be a number; blocks may hold anything."""
    scorer, texts = filled(family, form, kind=kind)
    poison(scorer, {}, value)
    check_rows(scorer, dict(enumerate(texts)))


@pytest.mark.parametrize("kind", CACHES)
def test_garbage_within_a_rows_keys_is_read(kind: str) -> None:
    """The negative control: the same poison one key earlier spoils the row."""
    scorer, texts = filled("llama", kind=kind)
    poison(scorer, {1: slice(len(texts[1]) - 1, None)}, 1e4)
    with pytest.raises(AssertionError, match="not close"):
        check_rows(scorer, dict(enumerate(texts)))


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize("leaver", (0, 1, 3))
def test_a_tenants_nan_is_not_inherited(family: str, form: Form, leaver: int) -> None:
    """The tenant had been longer once: what it wrote and took back is wiped as well."""
    scorer, texts = filled(family, form)
    longest = max(map(len, texts)) + 8
    scorer.score([leaver], [[1] * (longest - len(texts[leaver]))])
    with torch.inference_mode():
        for layer in scorer.cache.layers.values():
            for pool in (layer.keys, layer.values):
                pool[scorer.cache.slot(leaver), :longest] = torch.nan
    scorer.rewind([leaver], [1])
    scorer.release(leaver)
    assert all(pool.isfinite().all() for layer in scorer.cache.layers.values() for pool in (layer.keys, layer.values))
    scorer.admit(9)
    scorer.feed([9], [[1, 2, 3]])
    standing = {row: text for row, text in enumerate(texts) if row != leaver}
    check_rows(scorer, standing | {9: [1, 2, 3]})


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", KINDS)
def test_rows_come_and_go(family: str, kind: str) -> None:
    scorer, texts = filled(family, kind=kind)
    standing = dict(enumerate(texts))
    for leaver, newcomer in ((1, 10), (0, 11), (10, 1)):
        scorer.release(leaver)
        del standing[leaver]
        check_rows(scorer, standing)
        scorer.admit(newcomer)
        standing[newcomer] = [newcomer, 4, 2, newcomer + 1]
        scorer.feed([newcomer], [standing[newcomer]])
        check_rows(scorer, standing)
    first = 0 if kind == "ragged" else 1  # slot 0 of a table is that of dummies
    assert sorted(scorer.cache.slot(row) for row in standing) == list(range(first, first + 4))


@pytest.mark.parametrize("family", KINDS)
def test_growth_keeps_every_key(family: str) -> None:
    scorer, texts = filled(family, rows=2)
    standing = dict(enumerate(texts))
    capacity, slots = scorer.cache.capacity, scorer.cache.num_slots
    more = [i % VOCAB for i in range(2 * GRAIN)]
    scorer.feed([1], [more])
    standing[1] = [*texts[1], *more]
    for row in range(2, 7):
        scorer.admit(row)
        scorer.feed([row], [[row, 3]])
        standing[row] = [row, 3]
    assert scorer.cache.capacity > capacity and scorer.cache.num_slots > slots
    check_rows(scorer, standing)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("family", "form"), FORMS)
def test_rows_need_not_be_neighbours(family: str, form: Form, kind: str) -> None:
    """A pass may leave rows out, or name them in another order than they lie in."""
    scorer, texts = filled(family, form, kind=kind)
    for rows in ((0, 2), (3, 1), (2, 0, 3)):
        logits = scorer.score(rows, [[5, 6]] * len(rows)).split(2)
        for row, own in zip(rows, logits, strict=True):
            check(own, fresh(scorer.model, *texts[row], 5, 6)[-2:])
            scorer.rewind([row], [len(texts[row])])


@pytest.mark.parametrize("kind", CACHES)
def test_copies_are_rows_of_their_own(kind: str) -> None:
    scorer, texts = filled("llama", rows=2, kind=kind)
    for row, length in ((5, 4), (6, 8), (7, 11)):
        scorer.admit(row)
        scorer.cache.copy(1, row, length)
        scorer.feed([row], [[row, 9]])
    check_rows(scorer, dict(enumerate(texts)) | {n: [*texts[1][:k], n, 9] for n, k in ((5, 4), (6, 8), (7, 11))})


def test_a_budget_bounds_rows_in_one_piece() -> None:
    """Slots times capacity: what a pool that grows by halves would take beyond it is not taken."""
    scorer = Scorer(tiny_model("llama"), cache=RaggedCache(128))
    held, standing = scorer.cache, dict[int, list[int]]()
    for row in range(4):
        scorer.admit(row)
        standing[row] = [(row * 7 + i) % VOCAB for i in range(20 + row)]
        scorer.feed([row], [standing[row]])
        assert held.num_slots * held.capacity <= 128
        check_rows(scorer, standing)
    assert held.has_room({0: 32}) and not held.has_room({0: 33})
    assert held.has_room({}, NewRow((), None, 25)) and not held.has_room({}, NewRow((), None, 26))
    with pytest.raises(CacheFull, match="4 rows of 33 keys are more than 128 tokens"):
        scorer.score([0], [[1] * 13])
    check_rows(scorer, standing)
    for row in (1, 2, 3):
        scorer.release(row)
        del standing[row]
    more = [i % VOCAB for i in range(80)]
    scorer.feed([0], [more])
    check_rows(scorer, {0: [*standing[0], *more]})
    assert held.num_slots * held.capacity <= 128


def test_usage_counts_every_row_as_long_as_the_longest() -> None:
    """What is left is what `has_room` gives: one long row leaves short ones no room to speak of."""
    cache = RaggedCache(120)
    assert cache.usage == 0 and RaggedCache().usage is None
    for row, length in enumerate((30, 1, 1)):
        cache.admit(row)
        cache.extend([row], [length])
    assert cache.usage == 90 / 120 and cache.has_room({}, NewRow((), None, 30))
    cache.admit(3)
    assert cache.usage == 1 and not cache.has_room({}, NewRow((), None, 1))
    for row in (3, 2, 1):
        cache.release(row)
    cache.extend([0], [100])
    assert cache.usage == 1, "a row that is alone may go beyond it"


def test_bookkeeping() -> None:
    cache = RaggedCache()
    cache.admit(7)
    cache.admit(3)
    rows = cache.extend([7, 3], [5, 2])
    assert (rows.slots, rows.past, rows.counts) == ((0, 1), (0, 0), (5, 2))
    assert cache.capacity == GRAIN
    assert cache.addresses(rows).tolist() == [0, 1, 2, 3, 4, GRAIN, GRAIN + 1]
    cache.rewind(7, 1)
    assert (cache.length(7), cache.length(3)) == (1, 2)
    cache.release(7)
    assert cache.rows == (3,)
    assert cache.slot(3) == 0
    assert cache.length(3) == 2
    with pytest.raises(AssertionError, match="cannot keep"):
        cache.rewind(3, 3)
    with pytest.raises(AssertionError, match="already"):
        cache.admit(3)


@pytest.mark.parametrize("counts", [(), (0,), (3, 0, 2), (200, 1), (64, 65, 300)])
def test_ranges_one_after_the_other(counts: tuple[int, ...]) -> None:
    """Short and long ones are made in two ways."""
    starts = [7 * i for i in range(len(counts))]
    made = ranges(starts, counts)
    assert made.tolist() == [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    assert not len(made) or made.dtype is torch.int64


def test_dummies_have_the_same_slot_in_all_caches_of_the_same_rows() -> None:
    """One whose memory has grown further (the features a head heard before it ran first) has more slots."""
    grown, bare = RaggedCache(), RaggedCache()
    for cache in (grown, bare):
        for row in range(4):
            cache.admit(row)
        cache.extend(range(4), [1] * 4)
        if cache is grown:
            cache.layer(0, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
        cache.admit(4)
        cache.release(1)
        cache.release(3)
    assert grown.num_slots > bare.num_slots, "control"
    dummy = grown.reserve_slots(True)
    assert dummy == bare.reserve_slots(True) < bare.num_slots
    assert dummy not in {grown.slot(row) for row in grown.rows}


def test_the_slot_of_dummies_stays_within_memory_that_is_divided_anew() -> None:
    """Under a budget fewer slots may come of it where rows grow; another table than the one with dummies may ask."""
    cache = RaggedCache(384)
    for row in range(5):
        cache.admit(row)
    cache.extend(range(5), [40] * 5)
    for row in (1, 2, 3):
        cache.release(row)
    slots, dummy = cache.num_slots, cache.reserve_slots(True)
    cache.reserve_slots(False)
    cache.reserve([0, 4], [150, 150])
    assert 2 <= dummy < cache.num_slots < slots
