"""Blocks are shared, copied before they are written, found again, given away when memory is needed, and never lost."""

from __future__ import annotations

import random

import pytest
import torch

from forerun.cache.base import CacheFull, NewRow
from forerun.cache.blocks import BlockPool
from forerun.cache.paged import STRAY, PagedCache
from forerun.models.scorer import Scorer
from forerun.types import Source
from support.recompute import check, recomputed
from support.tiny import tiny_model

SIZE, VOCAB = 8, 97
CPU = torch.device("cpu")


def paged(num_tokens: int = 256, **options: int) -> PagedCache:
    return PagedCache(num_tokens, CPU, block_size=SIZE, **options)


def text(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB) for _ in range(length)]


def scorer_with(cache: PagedCache, **texts: list[int]) -> Scorer:
    """Rows a, b, ... are numbers 0, 1, ..."""
    scorer = Scorer(tiny_model("llama"), cache=cache)
    for row, own in enumerate(texts.values()):
        scorer.admit(row)
        scorer.feed([row], [own])
    return scorer


def check_row(scorer: Scorer, row: int, own: list[int]) -> None:
    """The row has the keys of its text, which the next tokens' logits show."""
    assert scorer.length(row) == len(own)
    check(scorer.score([row], [[5, 6]]), recomputed(scorer.model, [*own, 5, 6])[-2:])
    scorer.rewind([row], [len(own)])


def test_a_copy_shares_full_blocks_alone() -> None:
    cache = paged()
    scorer, own = scorer_with(cache, a=text(1, 20)), text(1, 20)
    scorer.admit(1)
    used = cache.num_used
    cache.copy(0, 1, 20)
    assert cache.num_used == used + 1, "two full blocks are shared, the third is copied"
    scorer.feed([1], [[3, 4]])
    check_row(scorer, 0, own)
    check_row(scorer, 1, [*own, 3, 4])
    cache.check()


def test_shared_blocks_are_in_use_once() -> None:
    cache = paged()
    assert cache.usage == 0
    scorer = scorer_with(cache, a=text(1, 20 * SIZE))
    assert cache.usage == 20 * SIZE / 256
    for row in (1, 2):
        scorer.admit(row)
        cache.copy(0, row, 20 * SIZE)
    assert sum(map(cache.length, cache.rows)) > 256 and cache.usage == 20 * SIZE / 256
    for row in (0, 1, 2):
        scorer.release(row)
    assert cache.usage == 0, "what can be found is given away where it is needed"


def test_keys_beyond_the_bound_are_all_of_it() -> None:
    """A row that is alone may have some more for a draft."""
    cache = paged(SIZE)
    scorer_with(cache, a=text(1, SIZE + 1))
    assert cache.usage == 1


def test_a_row_that_is_cut_back_into_a_shared_block_gets_its_own() -> None:
    cache = paged()
    scorer, own = scorer_with(cache, a=text(1, 24)), text(1, 24)
    scorer.admit(1)
    cache.copy(0, 1, 24)
    scorer.rewind([1], [11])
    scorer.feed([1], [[9, 9, 9, 9, 9, 9, 9]])
    check_row(scorer, 1, [*own[:11], 9, 9, 9, 9, 9, 9, 9])
    check_row(scorer, 0, own)
    cache.check()


def test_a_beginning_is_found_after_its_row_has_gone() -> None:
    cache = paged()
    scorer, own = scorer_with(cache, a=text(1, 21)), text(1, 21)
    cache.remember(0, own)
    scorer.release(0)
    assert cache.num_used == 0 and cache.pool.num_findable == 3
    for row, (other, shared) in enumerate(
        [([*own, 1, 2], 21), ([*own[:19], 96, 95], 16), ([*own[:20], 96], 20), ([96, *own[1:]], 0)]
    ):
        scorer.admit(row)
        assert cache.begin(row, other) == shared, "a block that only begins alike is copied where that is worth it"
        scorer.feed([row], [other[shared:]])
        check_row(scorer, row, other)
    cache.check()


def test_the_last_block_of_a_running_row_is_found_and_copied() -> None:
    """Its row goes on in place; what it gains can be found once it is told, and what was found stays as it was."""
    cache, own, gained = paged(), text(1, 13), text(2, 8)
    scorer = scorer_with(cache, a=own)
    cache.remember(0, own)
    used = cache.num_used
    scorer.feed([0], [gained[:2]])
    assert cache.num_used == used, "the row needs no copy to go on behind what others may find"
    for row, (known, shared) in enumerate([([*own, *gained], 13), ([*own[:12], 96], 12)], start=1):
        room = (cache.pool.num_available + 1) * SIZE
        assert cache.has_room({}, NewRow(known, None, room))
        assert not cache.has_room({}, NewRow(known, None, room + 1)), "a copy takes room"
        scorer.admit(row)
        assert cache.begin(row, known) == shared
        scorer.feed([row], [known[shared:]])
        check_row(scorer, row, known)
    scorer.feed([0], [gained[2:4]])
    check_row(scorer, 0, [*own, *gained[:4]])
    cache.remember(0, [*own, *gained[:4]])
    scorer.admit(3)
    assert cache.begin(3, [*own, *gained]) == 16 and cache.pool.num_findable == 3
    scorer.rewind([0], [10])
    scorer.feed([0], [[9, 9, 9, 9]])
    check_row(scorer, 0, [*own[:10], 9, 9, 9, 9])
    check_row(scorer, 3, [*own, *gained[:3]])
    cache.remember(0, [*own[:10], 9, 9, 9])
    scorer.rewind([0], [12])
    scorer.feed([0], [[8]])
    scorer.admit(4)
    assert cache.begin(4, [*own[:10], 9, 9, 9]) == 13
    check_row(scorer, 4, [*own[:10], 9, 9, 9])
    cache.check()


def test_other_sources_have_other_keys() -> None:
    cache, read = paged(), Source(ids=(1, 2))
    scorer = scorer_with(cache, a=text(1, 16))
    cache.remember(0, text(1, 16), read)
    for row, source, shared in ((1, None, 0), (2, Source(ids=(1, 3)), 0), (3, Source(ids=(1, 2)), 16)):
        scorer.admit(row)
        assert cache.begin(row, text(1, 20), source) == shared


def test_rejected_tokens_are_not_found() -> None:
    """Only what `remember` names is findable, and no more of it than the row has."""
    cache = paged()
    scorer = scorer_with(cache, a=text(1, 24))
    scorer.rewind([0], [15])
    cache.remember(0, text(1, 24))
    scorer.admit(1)
    assert cache.begin(1, text(1, 24)) == 15


def test_memory_is_taken_from_what_was_let_go_first() -> None:
    cache = paged(num_tokens=8 * SIZE)
    scorer = scorer_with(cache, a=text(1, 16), b=text(2, 16))
    for row in (0, 1):
        cache.remember(row, text(row + 1, 16))
        scorer.release(row)
    free = cache.pool.num_available - cache.pool.num_findable
    scorer.admit(5)
    scorer.feed([5], [text(3, (free + 2) * SIZE)])  # two blocks more than were free
    scorer.admit(6)
    assert cache.begin(6, text(1, 16)) == 0 and cache.begin(6, text(2, 16)) == 16
    cache.check()


def test_the_end_of_a_text_is_given_away_before_its_beginning() -> None:
    cache = paged(num_tokens=8 * SIZE)
    scorer = scorer_with(cache, a=text(1, 24))
    cache.remember(0, text(1, 24))
    scorer.release(0)
    free = cache.pool.num_available - cache.pool.num_findable
    scorer.admit(5)
    scorer.feed([5], [text(3, (free + 1) * SIZE)])  # one block more than was free
    scorer.admit(6)
    assert cache.begin(6, text(1, 24)) == 16


def test_a_row_does_not_write_over_what_others_may_find() -> None:
    cache, own = paged(), text(1, 16)
    scorer = scorer_with(cache, a=own)
    cache.remember(0, own)
    scorer.rewind([0], [11])
    scorer.feed([0], [[9, 9, 9, 9, 9]])
    scorer.admit(1)
    assert cache.begin(1, own) == 16
    check_row(scorer, 1, own)
    check_row(scorer, 0, [*own[:11], 9, 9, 9, 9, 9])
    cache.check()


def test_what_hangs_behind_a_block_goes_with_it() -> None:
    pool = BlockPool(3, 2)
    blocks = [pool.take() for _ in range(3)]
    pool.publish([1, 2, 3, 4, 5, 6], None, blocks)
    for block in blocks:  # the beginning first, which rows never do
        pool.drop(block)
    pool.take()
    assert pool.num_findable == 0 and pool.find([1, 2, 3, 4], None).blocks == ()
    assert pool.num_available == 2
    pool.check([[blocks[0]]] if pool._holders[blocks[0]] else [[b] for b in blocks if pool._holders[b]])


def test_no_room_changes_nothing() -> None:
    cache = paged(num_tokens=4 * SIZE)
    scorer = scorer_with(cache, a=text(1, 20), b=text(2, 20))
    room = cache.pool.num_available * SIZE
    assert cache.has_room({0: 24, 1: 24}) and not cache.has_room({0: 24 + room, 1: 25})
    with pytest.raises(CacheFull, match="more blocks of 8 tokens are needed"):
        scorer.score([0, 1], [[1] * room, [2] * room])
    check_row(scorer, 0, text(1, 20))
    check_row(scorer, 1, text(2, 20))
    cache.check()


def test_room_for_a_new_row_counts_what_it_shares() -> None:
    cache = paged(num_tokens=6 * SIZE)
    scorer = scorer_with(cache, a=text(1, 48))
    cache.remember(0, text(1, 48))
    free = cache.pool.num_available * SIZE
    assert not cache.has_room({}, NewRow(text(2, 48), None, free + 1))
    assert cache.has_room({}, NewRow(text(1, 48), None, free + 48))
    assert not cache.has_room({}, NewRow(text(1, 48), None, free + 49))
    scorer.release(0)
    total = cache.pool.num_blocks * SIZE
    assert cache.has_room({}, NewRow(text(1, 48), None, total)), "blocks that nobody holds are shared or given away"
    assert not cache.has_room({}, NewRow(text(1, 48), None, total + 1))


def test_the_pool_never_moves() -> None:
    """Whatever rows come, grow and go, an error included: recordings hold these addresses."""
    cache = paged()
    scorer = scorer_with(cache, a=text(1, 9))
    assert cache.table is not None

    def places() -> list[int]:
        assert cache.table is not None
        return [cache.table.data_ptr(), *(layer.keys.data_ptr() for layer in cache.layers.values())]

    before, version = places(), cache.version
    for row in range(1, 9):
        scorer.admit(row)
        scorer.feed([row], [text(row, 3 * row)])
    scorer.feed([0], [text(9, 80)])
    for row in (3, 1):
        scorer.release(row)
    scorer.reset()
    scorer.admit(0)
    scorer.feed([0], [text(1, 9)])
    check_row(scorer, 0, text(1, 9))
    assert places() == before and cache.version == version


def test_more_rows_than_the_table_has() -> None:
    cache = paged(num_tokens=8)
    for row in range(1500):
        cache.admit(row)
    assert len({cache.slot(row) for row in range(1500)} - {0}) == 1500
    assert cache.table is not None and len(cache.table) == cache.num_slots == 2048


def test_size() -> None:
    """Asked once, when the first row comes; a drafter's cache has room for as many tokens."""
    asked: list[int] = []

    def tokens() -> int:
        asked.append(1)
        return 100

    cache = PagedCache(tokens, CPU, block_size=SIZE, longest=32)
    other = cache.beside(CPU)
    assert not asked
    other.admit(0)
    cache.admit(0)
    assert asked == [1] and cache.num_tokens == other.num_tokens == 104
    assert cache.capacity == 32 + STRAY
    with pytest.raises(CacheFull, match="no row can have more than 160"):
        cache.extend([0], [161])


def test_picked_keys_lie_side_by_side_across_blocks() -> None:
    cache = paged()
    own = text(1, 14)
    scorer = scorer_with(cache, a=own)
    with torch.inference_mode():
        for layer in cache.layers.values():
            for pool in layer.flat:
                pool.copy_(torch.arange(len(pool))[:, None, None].expand_as(pool))
    layer = cache.layers[0].flat[0][:, 0, 0]
    scorer.cache.extend([0], [6])
    before = [layer[cache._address(0, i)].item() for i in range(20)]
    cache.keep(0, 14, [1, 3, 5])
    assert cache.length(0) == 17
    assert [layer[cache._address(0, i)].item() for i in range(17)] == [*before[:14], before[15], before[17], before[19]]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_never_lost(seed: int) -> None:
    """Hundreds of random events; after each, every block is free, findable or held as often as it is counted."""
    plan, cache = random.Random(seed), paged(num_tokens=20 * SIZE)
    lines = [text(i, 60) for i in range(3)]
    rows: dict[int, list[int]] = {}
    events = {"full": 0, "shared": 0}
    for number in range(600):
        verb = plan.choice(("admit", "extend", "extend", "rewind", "remember", "release", "copy"))
        row = plan.choice(list(rows)) if rows else None
        if verb == "admit" or row is None:
            rows[number] = plan.choice(lines)[: plan.randint(1, 60)]
            cache.admit(number)
            events["shared"] += cache.begin(number, rows[number]) > 0
        elif verb == "extend":
            try:
                cache.extend([row], [plan.randint(1, 12)])
            except CacheFull:
                events["full"] += 1
        elif verb == "rewind":
            cache.rewind(row, plan.randint(0, cache.length(row)))
        elif verb == "remember":
            cache.remember(row, rows[row][: cache.length(row)])
        elif verb == "release":
            cache.release(row)
            del rows[row]
        elif verb == "copy":
            cache.admit(number)
            cache.copy(row, number, plan.randint(0, cache.length(row)))
            rows[number] = rows[row]
        cache.check()
    assert min(events.values()) > 10
    for row in rows:
        cache.release(row)
    cache.forget()
    cache.check()
    assert cache.pool.num_available == cache.pool.num_blocks and not cache.pool.num_findable


def test_addresses_of_long_and_of_short_blocks() -> None:
    """Block by block where a row has many new tokens, else number by number: the table says where each lies."""
    cache = PagedCache(4096, CPU, longest=1024, block_size=16)
    for row in range(3):
        cache.admit(row)
        cache.extend([row], [(5, 16, 23)[row]])
    cache.release(1)
    cache.admit(1)
    for counts in ((200, 90, 311), (3, 1, 2), (1, 400, 16)):
        rows = cache.extend([0, 1, 2], list(counts))
        expected = [
            int(cache._table[slot, place // 16]) * 16 + place % 16
            for slot, past, count in zip(rows.slots, rows.past, rows.counts, strict=True)
            for place in range(past, past + count)
        ]
        assert cache.addresses(rows).tolist() == expected
