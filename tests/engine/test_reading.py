"""Prompts are read in chunks beside rows that decode: nobody waits for a whole one, and every text stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import ceil
from typing import Any

import pytest
import torch

from engine.device_engines import engine as device_engine
from forerun import DraftModel, PromptLookup, SpeculativeDecoder
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels, SamplingParams
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.reading import JOIN_WITH_HEAD, NOBODY_DECODES, divide_room
from forerun.models.scorer import Scorer
from forerun.policy.heuristics import Constant
from support.finish import tokens_by_request
from support.tiny import draft_of, ragged_prompts, tiny_model

LONG = 70  # tokens of the newcomer's prompt
CHUNK = 16


def engine_of(drafter: Drafter | None = None, **settings: int) -> Engine:
    return Engine(Scorer(tiny_model("llama")), drafter, Constant(2), **{"join_tokens": 0, **settings})


def request(prompt: list[int], number: int, tokens: int = 12) -> Request:
    return Request(
        prompt=tuple(prompt), max_new_tokens=tokens, request_id=number, seed=3, params=SamplingParams(temperature=0.8)
    )


def prompts() -> list[list[int]]:
    first, second = ragged_prompts(2, 97, 5, longest=9)
    return [first, second, ragged_prompts(3, 97, 6, longest=LONG)[1]]


@pytest.mark.quick("0-model", "200-none")
@pytest.mark.parametrize("drafter", ("none", "lookup", "model"))
@pytest.mark.parametrize("join_tokens", (0, 8, 200))
def test_a_newcomer_is_read_in_chunks_and_changes_no_text(drafter: str, join_tokens: int) -> None:
    def drafting() -> Drafter | None:
        target = tiny_model("llama")
        return {"none": None, "lookup": PromptLookup(), "model": DraftModel(draft_of(target))}[drafter]

    alone = {}
    for number, prompt in enumerate(prompts()):
        engine = engine_of(drafting())
        engine.add(request(prompt, number))
        alone |= tokens_by_request(engine)

    engine = engine_of(drafting(), prompt_tokens=CHUNK, join_tokens=join_tokens)
    for number, prompt in enumerate(prompts()[:2]):
        engine.add(request(prompt, number))
    engine.step()
    handle = engine.add(request(prompts()[2], 2))
    waited = 0
    while handle not in {gained.row for gained in engine.step()}:
        waited += 1
        assert max(map(engine.target.length, engine.target.cache.rows)) <= max(CHUNK * (waited + 1), 9 + 12)
    # the round takes the last tokens along where it may, else it follows the last chunk in the same step
    along = min(join_tokens, CHUNK)  # whatever may join a round beside nobody
    assert waited == (ceil((LONG - along) / CHUNK) if along else ceil((LONG - 1) / CHUNK) - 1)
    assert tokens_by_request(engine) == alone


def test_rows_that_decode_gain_tokens_meanwhile() -> None:
    engine = engine_of(prompt_tokens=CHUNK)
    first = engine.add(request(prompts()[0], 0, tokens=40))
    engine.step()
    engine.add(request(prompts()[2], 1))
    for _ in range(3):
        assert [gained.row for gained in engine.step()] == [first]


@pytest.mark.parametrize("together", [True, False])
def test_where_nobody_decodes_a_batch_of_one_call_begins_together(together: bool) -> None:
    """And with requests that come by themselves the short ones do not wait for the long one."""
    engine = engine_of(prompt_tokens=CHUNK)
    engine.begins_together = together
    for number, prompt in enumerate(prompts()):
        engine.add(request(prompt, number))
    assert len(engine.step()) == (3 if together else 2)


def test_a_call_of_generate_reads_all_prompts_at_once() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), None)
    decoder.engine.prompt_tokens = CHUNK
    with decoder.stream([*prompts(), prompts()[2][::-1]], max_new_tokens=4) as stream:
        assert {gained.row for gained in next(stream)} == {0, 1, 2, 3}


def fed_by(engine: Engine) -> list[int]:
    """Tokens of each pass over prompts that is still to come."""
    fed, feed, feed_to_end = list[int](), engine.target.feed, engine.target.feed_to_end

    def counted(rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        fed.append(sum(map(len, blocks)))
        feed(rows, blocks)

    def counted_to_end(rows: Sequence[int], blocks: Sequence[Sequence[int]], ending: Sequence[int]) -> Any:
        fed.append(sum(map(len, blocks)))
        return feed_to_end(rows, blocks, ending)

    engine.target.feed, engine.target.feed_to_end = counted, counted_to_end  # type: ignore[method-assign]
    return fed


VERY_LONG, BUDGET = 400, 16


def beside_a_long_one(recorded: bool, drafter: str) -> tuple[Engine, list[Request]]:
    long, short = ragged_prompts(3, 97, 9, longest=VERY_LONG)[1], ragged_prompts(2, 97, 8, longest=10)[1]
    cache = PagedCache(4096, torch.device("cpu"), longest=VERY_LONG + 64, block_size=16)
    engine = device_engine(recorded, drafter=drafter, policy=2, cache=cache)
    engine.prompt_tokens, engine.join_tokens = BUDGET, 0
    return engine, [request(long, 0), request(short, 1)]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("drafter", ["none", "model"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.quick("False-none-False", "True-model-True")
def test_a_short_prompt_does_not_wait_for_a_long_one_on_an_idle_engine(
    recorded: bool, drafter: str, behind: bool
) -> None:
    """Whether it comes together with the long one or between two steps that read it."""
    engine, asked = beside_a_long_one(recorded, drafter)
    alone = {}
    for each in asked:
        apart, _ = beside_a_long_one(recorded, drafter)
        apart.add(each)
        alone |= tokens_by_request(apart)
    fed = fed_by(engine)
    long = engine.add(asked[0])
    if behind:
        engine.add(request([7, 8, 9, *asked[0].prompt], 2))  # or the first would be read in one pass
        assert engine.step() == []
    short = engine.add(asked[1])
    gained = engine.step()
    assert short in {entry.row for entry in gained} and long not in {entry.row for entry in gained}
    assert max(fed) <= NOBODY_DECODES * BUDGET, "no step is longer than that"
    found = tokens_by_request(engine)
    assert {number: found[number] for number in alone} == alone


def test_a_prompt_that_is_alone_is_read_in_passes_as_large_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.scorer.PREFILL_TOKENS", 192)
    engine, asked = beside_a_long_one(False, "none")
    fed = fed_by(engine)
    engine.add(asked[0])
    assert engine.step() == [] and engine.step() == [], "so that somebody may come between"
    assert engine.step()
    assert fed == [192, 192, VERY_LONG - 1 - 384]


def test_whoever_needs_least_ends_first_and_whoever_came_first_gets_on() -> None:
    assert divide_room([600, 10, 30], 64) == [24, 10, 30]
    assert divide_room([600, 100, 50], 40) == [10, 0, 30]
    assert divide_room([20, 20, 20], 40) == [20, 20, 0]
    assert divide_room([5, 600], 1000) == [5, 600]
    assert divide_room([600, 1], 1) == [1, 0]
    assert divide_room([], 8) == []
    assert divide_room([3, 4], 0) == [0, 0]


def test_short_prompts_that_go_on_coming_starve_nobody() -> None:
    engine, (long, _) = beside_a_long_one(False, "none")
    handle = engine.add(long)
    gained: set[int] = set()
    for number in range(1, 4 * VERY_LONG // BUDGET + 2):
        short = ragged_prompts(number + 2, 97, number, longest=2 * BUDGET)[-1]
        engine.add(request(short, number, tokens=2))
        gained |= {entry.row for entry in engine.step()}
        if handle in gained:
            return
    pytest.fail("the long prompt was never read to its end")


@pytest.mark.parametrize("shared", [300, 0])
def test_a_shared_beginning_is_read_once_though_shorter_prompts_go_first(shared: int) -> None:
    """The control has no beginning in common, and is read as a whole each time."""
    engine, (long, _) = beside_a_long_one(False, "none")
    fed, beginning = fed_by(engine), long.prompt[:shared]
    ends = [ragged_prompts(3, 97, seed, longest=40)[1] for seed in (1, 2, 3)]
    for number, end in enumerate(ends):
        other = long.prompt[number : 300 + number] if not shared else beginning
        engine.add(request([*other, *end], number))
        if number == 1:
            engine.step()
    said = tokens_by_request(engine)
    assert len(said) == 3
    all_of_it = 3 * 300 + sum(map(len, ends)) - 3
    assert sum(fed) == all_of_it if not shared else sum(fed) <= all_of_it - 2 * (300 - 16)


def test_the_others_end_while_a_prompt_is_read() -> None:
    engine = engine_of(prompt_tokens=CHUNK)
    first = engine.add(request(prompts()[0], 0, tokens=40))
    engine.step()
    engine.add(request(prompts()[2], 1, tokens=5))
    engine.step()
    engine.abort(first)
    assert engine.step(), "the newcomer is read to the end at once"
    assert len(tokens_by_request(engine)[1]) == 5


def test_a_row_that_is_being_read_can_be_aborted() -> None:
    engine = engine_of(prompt_tokens=CHUNK, keep_rows=2)
    engine.add(request(prompts()[0], 0, tokens=30))
    engine.step()
    handle = engine.add(request(prompts()[2], 1))
    engine.step()
    engine.abort(handle)
    assert [result.tokens for result in engine.take_results()] == [()]
    again = engine.add(request(prompts()[2], 1))
    found = tokens_by_request(engine)
    fresh = engine_of()
    fresh.add(request(prompts()[2], 1))
    assert found[1] == tokens_by_request(fresh)[1] and again != handle


@pytest.mark.parametrize("cache", [RaggedCache, lambda: PagedCache(600, torch.device("cpu"), block_size=8)])
@pytest.mark.parametrize("known", [0, 24])
@pytest.mark.parametrize("drafter", ["none", "feature"])
@pytest.mark.slow
def test_copies_of_a_prompt_are_read_once_and_in_chunks(cache: Any, known: int, drafter: str) -> None:
    """Nobody who decodes waits for more than a chunk, however many begin with it; the copies begin together.

    Where the beginning of the prompt is `known`, because another row has it, and keys lie in blocks, that is not read.
    """
    asked = [request(prompts()[0], 0, tokens=30), *(request(prompts()[2], number) for number in (1, 2, 3))]
    want = {}
    for each in asked:
        alone = device_engine(False, drafter=drafter, policy=2)
        alone.add(each)
        want |= tokens_by_request(alone)

    engine = device_engine(False, drafter=drafter, policy=2, cache=cache())
    engine.prompt_tokens = CHUNK
    if known:
        engine.add(request([*prompts()[2][:known], 5], 9, tokens=30))
    engine.add(asked[0])
    engine.step()
    fed, feed = list[int](), engine.target.feed

    def counted(rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        fed.append(sum(map(len, blocks)))
        feed(rows, blocks)

    engine.target.feed = counted  # type: ignore[method-assign]
    handles = {engine.add(each) for each in asked[1:]}
    while not (gained := handles & {entry.row for entry in engine.step()}):
        pass
    assert gained == handles
    is_found = known and drafter == "none" and not engine.target.cache.reads_in_place
    assert max(fed) <= CHUNK and sum(fed) == LONG - 1 - (known if is_found else 0)
    said = tokens_by_request(engine)
    assert {number: said[number] for number in want} == want


def test_a_failing_pass_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(prompt_tokens=CHUNK)
    engine.add(request(prompts()[0], 0))
    engine.step()
    engine.add(request(prompts()[2], 1))
    engine.step()
    feed = engine.target.feed
    monkeypatch.setattr(engine.target, "feed", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    monkeypatch.setattr(engine.target, "feed", feed)
    found = tokens_by_request(engine)
    for number in (0, 1):
        alone = engine_of()
        alone.add(request(prompts()[0 if number == 0 else 2], number))
        assert found[number] == tokens_by_request(alone)[number]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ("none", "model", "lookup", "exit"))
@pytest.mark.parametrize("decoding", (3, 5))
def test_recorded_rounds_write_nothing_into_a_prompt_that_is_being_read(drafter: str, decoding: int) -> None:
    """A table for four or eight rows has entries without a row, whose keys go to a slot that nobody has."""
    asked = [request(prompt, number, tokens=30) for number, prompt in enumerate(ragged_prompts(decoding, 97, 5))]
    late = replace(request(prompts()[2], decoding), params=SamplingParams())

    alone = device_engine(False, drafter=drafter, policy=2)
    alone.add(late)
    want = tokens_by_request(alone)[decoding]
    engine = device_engine(True, drafter=drafter, policy=2)
    engine.prompt_tokens = 3
    for each in asked:
        engine.add(each)
    engine.step()
    engine.add(late)
    assert tokens_by_request(engine)[decoding] == want


def test_a_prompt_that_joins_a_round_has_its_share_of_the_time() -> None:
    """A clock moves by a second each time it is asked; one pass scores 9 tokens; the last is the round's own."""
    ticks = count()
    engine = engine_of(join_tokens=64)
    engine.clock = lambda: float(next(ticks))
    engine.add(request(list(range(1, 10)), 0, tokens=2))
    engine.step()
    taken_in = 1  # a second for admitting it
    assert engine.seconds.prefill == pytest.approx(taken_in + 8 / 9) and engine.seconds.score == pytest.approx(1 / 9)
    engine.step()
    assert engine.seconds.prefill == pytest.approx(taken_in + 8 / 9), "later rounds read no prompt"


@pytest.mark.parametrize(("family", "joins"), [("llama", True), ("bloom", False)])
def test_a_long_prompt_joins_a_round_where_few_logits_can_be_made(family: str, joins: bool) -> None:
    """Logits of a whole prompt would take longer than the pass that is saved, and gigabytes."""
    model = tiny_model(family)
    engine = Engine(Scorer(model, use=Kernels.OFF), None, Constant(0))
    rows: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda *call: rows.append(call[2][..., 0].numel()))
    try:
        for length in (40, 200):
            engine.add(request([5, 6, 7, 8] * (length // 4), length, tokens=2))
            tokens_by_request(engine)
    finally:
        hook.remove()
    assert max(rows) == (1 if joins else 40) < JOIN_WITH_HEAD
