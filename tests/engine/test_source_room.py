"""What encoders have read counts as the rows' own tokens do: rows wait for it, and nothing exceeds the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from engine.device_engines import SAMPLED, texts
from engine.room import SIZE, check_blocks, check_nothing_is_held, paged, watched_memory
from forerun import SpeculativeDecoder
from forerun.cache.base import STRAY, CacheFull, CacheLayer, KeyValueCache
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.drafters import DraftModel, EarlyExit, PromptLookup
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.device.choose import runner_of
from forerun.errors import InvalidArgument
from forerun.models.cache_size import bytes_per_token
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Source
from support.seq2seq import rows_of, source_of
from support.tiny import draft_of, ragged_prompts, tiny_model

BUDGET = 768
EITHER = pytest.mark.parametrize("form", [paged, RaggedCache], ids=["paged", "ragged"])

DRAFTERS: dict[str, Callable[[Any], Drafter | None]] = {
    "none": lambda model: None,
    "own": lambda model: DraftModel(draft_of(model)),
    "shared": lambda model: DraftModel(draft_of(model), shares_encoder=True),
    "exit": lambda model: EarlyExit(1),
    "lookup": lambda model: PromptLookup(max_ngram=1),
}


def engine(
    cache: KeyValueCache | None = None,
    *,
    family: str = "bart",
    drafter: str = "none",
    on_device: bool = False,
    keep_rows: int = 0,
) -> Engine:
    model = tiny_model(family)
    target = Seq2SeqScorer(model, cache=cache, use=Kernels.OFF)
    made = Engine(target, DRAFTERS[drafter](model), Constant(3), keep_rows=keep_rows, compile=False)
    if on_device:
        made.pair.runner = runner_of(target, made.drafter, made.rule, made.clock)
    return made


def asked(number: int, family: str = "bart", new: int = 12) -> list[Request]:
    """Rows that read sources of different lengths; every third reads what the one before it does."""
    read = [source_of(row) for row in rows_of(family, number)]
    return [
        Request(
            prompt=tuple(prompt), source=read[i - 1 if i % 3 == 2 else i], max_new_tokens=new + i % 3, params=SAMPLED,
            seed=1, request_id=i,
        )
        for i, prompt in enumerate(ragged_prompts(number, 97, 1, longest=12))
    ]  # fmt: skip


@pytest.mark.quick("paged")
@pytest.mark.parametrize(("form", "budget"), [(paged, BUDGET + STRAY), (RaggedCache, BUDGET)], ids=["paged", "ragged"])
def test_a_thousand_rows_and_their_sources_never_exceed_the_budget(
    form: Any, budget: int, monkeypatch: MonkeyPatch
) -> None:
    """At no moment, within steps neither; and no memory beside that of the budget holds a key."""
    wanted = asked(1000, new=1)
    want = texts(engine(), wanted)
    made, most_rows, most_read = engine(form(BUDGET)), 0, 0
    most = watched_memory(monkeypatch)
    for request in wanted:
        made.add(request)
    target = made.target
    assert isinstance(target, Seq2SeqScorer)
    each = bytes_per_token(target.model)
    while not made.is_idle:
        made.step()
        check_blocks(made)
        most_rows, most_read = max(most_rows, len(made.roster.running)), max(most_read, len(target.sources.cache.rows))
        assert bytes_of(target) <= (budget + (SIZE if form is paged else 0)) * each
    check_nothing_is_held(made)
    assert {result.request.request_id: result.tokens for result in made.take_results()} == want
    assert 0.8 * budget < max(most) <= budget and most_rows > most_read > 10


def bytes_of(target: Seq2SeqScorer) -> int:
    """Of all keys and values there are, wherever they lie."""
    layers = [*target.cache.layers.values(), *target.sources.cache.layers.values()]
    pools = {pool.data_ptr(): pool.nbytes for layer in layers for pool in (layer.keys, layer.values)}
    return sum(pools.values())


@EITHER
def test_control_sources_that_nobody_counts_are_noticed(form: Any, monkeypatch: MonkeyPatch) -> None:
    rows = [Request(prompt=(2, 5), source=Source(ids=(i + 5,) * 40), max_new_tokens=6, request_id=i) for i in range(20)]
    want = texts(engine(), rows)

    def is_sent_away() -> bool:
        made = engine(form(168))
        try:
            assert texts(made, rows) == want
        except CacheFull:
            return True
        return made.num_preempted > 0

    assert not is_sent_away(), "a row that has come is not sent away by what it came for"
    monkeypatch.setattr(KeyValueCache, "keys_to_read", lambda *_: 0)
    assert is_sent_away()


CASES = [  # family, drafter, whether rounds are the device's
    ("bart", "none", False), ("bart", "own", True), ("bart", "shared", False), ("t5_gated", "exit", False),
    ("whisper", "shared", True), ("whisper", "lookup", False), ("moonshine", "none", True), ("t5", "own", False),
]  # fmt: skip


@pytest.mark.quick("paged-bart-own-True")
@pytest.mark.parametrize(("family", "drafter", "on_device"), CASES)
@EITHER
def test_preempted_rows_say_the_same(form: Any, family: str, drafter: str, on_device: bool) -> None:
    """What a row reads goes with it and is read again: with a fixed draft length its tokens are the same."""
    wanted = asked(7, family, new=30)
    room = max(map(longest_need(engine(family=family)), wanted)) + (24 if form is paged else 60)
    made = engine(form(room), family=family, drafter=drafter, on_device=on_device)
    assert texts(made, wanted) == texts(engine(family=family, drafter=drafter), wanted)
    assert made.first_fault is None
    check_nothing_is_held(made)


def longest_need(made: Engine) -> Callable[[Request], int]:
    """Tokens that a row takes at its end, with its source."""

    def need(request: Request) -> int:
        return made.target.cache.keys_of_source(request.source) + len(request.prompt) + request.max_new_tokens

    return need


@EITHER
def test_rows_are_preempted_with_what_they_read(form: Any) -> None:
    wanted = [
        Request(prompt=(2, 5), source=Source(ids=(i + 1,) * 10), max_new_tokens=40, request_id=i) for i in range(4)
    ]
    made = engine(form(120))
    for request in wanted:
        made.add(request)
    held = set()
    while not made.is_idle:
        made.step()
        assert isinstance(made.target, Seq2SeqScorer)
        held.add(len(made.target.sources.cache.rows) - len(made.roster.running))
    assert made.num_preempted > 0 and held == {0}
    assert {r.request.request_id: r.tokens for r in made.take_results()} == texts(engine(), wanted)


@EITHER
def test_a_source_that_several_rows_read_counts_once(form: Any) -> None:
    def most_running(sources: list[Source]) -> int:
        made, most = engine(form(128)), 0
        for i, source in enumerate(sources):
            made.add(Request(prompt=(2, 5), source=source, max_new_tokens=6, request_id=i))
        while not made.is_idle:
            made.step()
            most = max(most, len(made.roster.running))
        return most

    assert most_running([Source(ids=(5,) * 40)] * 6) == 6
    assert most_running([Source(ids=(i + 5,) * 40) for i in range(6)]) == (5 if form is paged else 2)


@EITHER
def test_a_row_that_cannot_fit_with_its_source_is_refused(form: Any) -> None:
    made, source = engine(form(64)), Source(ids=(5,) * 30)
    with pytest.raises(
        InvalidArgument,
        match=r"source of 30 encoded positions, a prompt of 4 tokens and up to 31 new ones are 65 tokens.* of 64: "
        "shorten the source.*cache_tokens=65",
    ):
        made.add(Request(prompt=(2,) * 4, source=source, max_new_tokens=31))
    whole = Request(prompt=(2,) * 4, source=source, max_new_tokens=30, params=SAMPLED, seed=2)
    assert texts(made, [whole]) == texts(engine(), [whole])


@pytest.mark.quick(every=2)
@EITHER
@pytest.mark.parametrize("drafter", ["none", "own", "shared", "exit"])
def test_a_row_that_fits_to_the_last_token_is_served(form: Any, drafter: str) -> None:
    """Prompt, new tokens and source are the budget, which no block ends with."""
    source = Source(ids=tuple(range(5, 46)))
    whole = Request(prompt=(2, 7, 9), source=source, max_new_tokens=57, params=SAMPLED, seed=2)
    made = engine(form(101), drafter=drafter)
    assert texts(made, [whole]) == texts(engine(drafter=drafter), [whole])
    check_nothing_is_held(made)


@EITHER
def test_kept_rows_and_what_they_read_leave_where_they_are_in_the_way(form: Any) -> None:
    made = engine(form(64), keep_rows=4)
    for i in range(5):
        request = Request(prompt=(2, 5), source=Source(ids=(i + 1,) * 40), max_new_tokens=20, params=SAMPLED, seed=1)
        assert texts(made, [request]) == texts(engine(), [request])
        check_blocks(made)


def test_what_a_mask_leaves_out_gives_its_memory_back() -> None:
    """Until it is encoded a source counts with all its frames."""
    features = rows_of("moonshine")[0]
    mask = torch.zeros(len(features), dtype=torch.long)
    mask[:1200] = 1
    for cache in (paged(64), RaggedCache(64)):
        target = Seq2SeqScorer(tiny_model("moonshine"), cache=cache)
        source = Source(features=features, mask=mask)
        target.admit(0)
        target.read(0, source)
        (number,) = target.sources.cache.rows
        whole = target.sources.cache.length(number)
        assert whole == target.encoder.length(source) == cache.keys_of_source(source)
        target.encode()
        assert target.sources.cache.length(number) < whole
        if isinstance(cache, PagedCache):
            cache.check()


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "moonshine"])
def test_a_source_is_counted_with_as_many_positions_as_it_has(family: str) -> None:
    target = Seq2SeqScorer(tiny_model(family))
    for row in rows_of(family, 3):
        states, _ = target.encoder.run([source_of(row)])
        assert target.encoder.length(source_of(row)) == len(states[0])
        assert target.encoder.length(Source(states=states[0])) == len(states[0])


class Interrupted(list[Source]):
    """A list whose user presses Ctrl-C as it grows."""

    def append(self, source: Source) -> None:
        raise KeyboardInterrupt


@EITHER
def test_an_interrupt_as_a_row_begins_to_read_leaves_nothing_behind(form: Any) -> None:
    target = Seq2SeqScorer(tiny_model("bart"), cache=form(256))
    target.admit(0)
    target.sources.waiting = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        target.read(0, Source(ids=(5, 6, 7)))
    target.sources.waiting = []
    target.release(0)
    assert target.sources.cache.rows == () and not target.sources.is_read(Source(ids=(5, 6, 7)))
    if isinstance(target.cache, PagedCache):
        target.cache.check()
        assert target.cache.num_used == 0


@EITHER
def test_what_is_reset_only_half_reads_no_old_blocks(form: Any, monkeypatch: MonkeyPatch) -> None:
    """A second Ctrl-C: a source that is still taken for read would find the keys of whoever has its blocks by then."""
    target, source = Seq2SeqScorer(tiny_model("bart"), cache=form(256)), Source(ids=(5, 6, 7))
    target.admit(0)
    target.read(0, source)
    target.encode()
    clear = type(target.cache).clear

    def interrupted(cache: KeyValueCache) -> None:
        clear(cache)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(target.cache), "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.reset()
    assert not target.sources.is_read(source)


def test_an_interrupt_as_room_is_given_back_leaves_all_layers_alike() -> None:
    rows = RaggedCache(400)
    rows.admit(0)
    rows.admit(1)
    places = rows.extend([0], [20])
    for index in (0, 1):
        rows.write(index, rows.addresses(places), torch.ones(20, 2, 4), torch.ones(20, 2, 4))
    rows.release(1)
    before = rows.num_slots, rows.capacity
    views, interrupts = CacheLayer.__post_init__, [KeyboardInterrupt()]

    def interrupted(layer: CacheLayer) -> None:
        if layer is rows.layers[1] and interrupts:
            raise interrupts.pop()
        views(layer)

    with MonkeyPatch.context() as patch:
        patch.setattr(CacheLayer, "__post_init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rows._give_back_reserve()
    assert (rows.num_slots, rows.capacity) == before
    assert {layer.keys.shape[:2] for layer in rows.layers.values()} == {before}
    rows._give_back_reserve()
    assert {layer.keys.shape[:2] for layer in rows.layers.values()} == {(rows.num_slots, rows.capacity)} != {before}


def test_more_memory_than_rows_need_goes_to_sources_and_back() -> None:
    """Rows in one piece grow by half, as far as the budget goes; whoever needs it next is given what is not needed."""
    rows = RaggedCache(400)
    read = rows.for_sources()
    for row in (0, 1):
        rows.admit(row)
    keys = torch.arange(2.0 * 100).view(200, 1, 1).expand(200, 2, 4)

    def put(cache: RaggedCache, row: int, count: int) -> None:
        places = cache.extend([row], [count])
        cache.write(0, cache.addresses(places), keys[:count], -keys[:count])

    def check(cache: RaggedCache, row: int, count: int) -> None:
        layer, slot = cache.layers[0], cache.slot(row)
        assert torch.equal(layer.keys[slot, :count], keys[:count])
        assert torch.equal(layer.values[slot, :count], -keys[:count])

    put(rows, 0, 100)
    put(rows, 1, 70)
    assert rows.memory > 200
    read.admit(9)
    put(read, 9, 150)
    assert rows.memory == 200 and read.memory <= 200
    for row, count in ((0, 100), (1, 70)):
        check(rows, row, count)
    check(read, 9, 150)
    assert rows.usage == read.usage == 350 / 400
    with pytest.raises(CacheFull, match="beside 150 tokens"):
        rows.extend([0], [30])
    read.release(9)
    places = rows.extend([0], [30])
    assert places.past == (100,) and rows.memory + read.memory <= 400
    check(rows, 0, 100)
    check(rows, 1, 70)


def test_in_blocks_both_share_a_pool_and_its_tensors() -> None:
    """So whatever part of a GPU's memory they take by default, it is for both."""
    target = Seq2SeqScorer(tiny_model("whisper"), cache=paged(256))
    for row, features in enumerate(rows_of("whisper", 2)):
        target.admit(row)
        target.read(row, source_of(features))
    target.score([0, 1], [[2, 30], [2]])
    assert target.sources.cache.layers is target.cache.layers
    used = target.cache.num_used * SIZE  # type: ignore[attr-defined]
    assert used == 2 * (24 + 8) and target.cache.usage == used / 256


def test_cache_tokens_of_a_decoder_are_for_both() -> None:
    model, inputs = tiny_model("bart"), {"input_ids": torch.full((1, 40), 5)}
    decoder = SpeculativeDecoder(model, None, cache_tokens=50)
    out = decoder.generate(**inputs, max_new_tokens=9)
    assert out.new_tokens == SpeculativeDecoder(model, None).generate(**inputs, max_new_tokens=9).new_tokens
    with pytest.raises(InvalidArgument, match=r"source of 40 encoded positions.* cache_tokens=51"):
        decoder.generate(**inputs, max_new_tokens=10)
