"""Rows wait for room, are preempted and come again, share beginnings, and say what they would have said alone."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine.device_engines import CUT, SAMPLED, Texts, engine, finish, requests, texts
from engine.room import SIZE, check_blocks, check_nothing_is_held, paged, watched_memory
from forerun.cache.base import STRAY, KeyValueCache
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.drafters import DraftModel, EarlyExit, Tree
from forerun.drafters.tree import MOST_NODES
from forerun.engine import Engine, Request
from forerun.engine.admission import Admission
from forerun.engine.request import FinishReason
from forerun.engine.roster import Roster
from forerun.errors import InvalidArgument
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Rule, Source
from support.finish import finished
from support.seq2seq import rows_of, source_of
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

BUDGET = 768  # tokens, for more rows than fit


WAYS = [
    ("model", Rule.TOKEN, False),
    ("model", Rule.TOKEN, True),
    ("none", Rule.TOKEN, True),
    ("lookup", Rule.BLOCK, False),
    ("model", Rule.BLOCK, True),
    ("model", Rule.COUPLED, False),
    ("random", Rule.TOKEN, True),
]


@pytest.mark.parametrize(("drafter", "rule", "on_device"), WAYS)
@pytest.mark.quick("model-block-True")
def test_rows_in_blocks_say_the_same(drafter: str, rule: Rule, on_device: bool) -> None:
    asked = requests(5, [SAMPLED, CUT, SAMPLED, CUT, SAMPLED])
    want = texts(engine(on_device, drafter=drafter, rule=rule), asked)
    made = engine(on_device, drafter=drafter, rule=rule, cache=paged(4096))
    assert texts(made, asked) == want
    assert made.num_preempted == 0
    check_nothing_is_held(made)


@pytest.mark.parametrize("cache", [partial(paged, 80), partial(RaggedCache, 160)], ids=["paged", "ragged"])
@pytest.mark.parametrize(("drafter", "rule", "on_device"), WAYS)
@pytest.mark.quick("model-token-False-paged")
def test_preempted_rows_say_the_same(cache: Any, drafter: str, rule: Rule, on_device: bool) -> None:
    """With a fixed draft length a row's tokens depend on nothing else, not even on having been sent away."""
    asked = requests(6, new=40)
    want = texts(engine(on_device, drafter=drafter, rule=rule), asked)
    made = engine(on_device, drafter=drafter, rule=rule, cache=cache())
    assert texts(made, asked) == want
    assert made.num_preempted > 0
    check_nothing_is_held(made)


def test_control_a_preempted_row_that_forgets_its_round_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would be drawn twice."""
    preempt = Roster.preempt_newest

    def forgetting(roster: Roster) -> None:
        preempt(roster)
        roster.waiting[0].round = 0

    monkeypatch.setattr(Roster, "preempt_newest", forgetting)
    asked = requests(6, new=40)
    made = engine(False, cache=paged(80))
    assert texts(made, asked) != texts(engine(False), asked)
    assert made.num_preempted > 0


@pytest.mark.quick("paged")
@pytest.mark.parametrize(("cache", "budget"), [(paged, BUDGET + STRAY), (RaggedCache, BUDGET)], ids=["paged", "ragged"])
def test_a_thousand_rows_never_exceed_the_budget(cache: Any, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment, within steps neither. Blocks are allocated at once, those included that a row which is alone may
    need; what rows hold of them is live tokens and a block a row."""
    asked = [
        Request(prompt=tuple(prompt), max_new_tokens=1 + i % 3, params=SAMPLED, seed=1, request_id=i)
        for i, prompt in enumerate(ragged_prompts(1000, 97, 1, longest=12))
    ]
    want = texts(engine(False, drafter="none"), asked)
    made = engine(False, drafter="none", cache=cache(BUDGET))
    most = watched_memory(monkeypatch)
    for request in asked:
        made.add(request)
    most_rows, each = 0, 2 * 2 * 2 * 8 * 4  # bytes of a token: two layers' keys and values, two heads of eight floats
    while not made.is_idle:
        made.step()
        most_rows = max(most_rows, len(made.roster.running))
        assert beyond_live(made) <= 0
        scratch = SIZE * each if isinstance(made.target.cache, PagedCache) else 0
        assert made.target.cache.num_bytes() <= budget * each + scratch
    check_nothing_is_held(made)
    assert {result.request.request_id: result.tokens for result in made.take_results()} == want
    assert 0.8 * budget < max(most) <= budget and most_rows > 20


def beyond_live(made: Engine) -> float:
    """Of any row, tokens of memory beyond what is promised for blocks: its own, a twentieth of them, and a block."""
    found = [0.0]
    for cache in made.pair.caches:
        if isinstance(cache, PagedCache):
            found += [
                len(cache._blocks[row]) * cache.piece - 1.05 * cache.length(row) - cache.piece for row in cache.rows
            ]
    return max(found)


def in_large_blocks(on_device: bool) -> list[float]:
    """What rows held beyond that after every step: in a GPU's blocks, with drafts and rounds under way."""
    made = engine(on_device, cache=PagedCache(8192, torch.device("cpu")))
    for i in range(24):
        prompt = tuple((31 * i + 7 * place) % 89 + 1 for place in range(200 + 9 * i if i % 3 else 1 + 4 * i))
        made.add(Request(prompt=prompt, max_new_tokens=12, params=SAMPLED, seed=1, request_id=i))
    found = []
    while not made.is_idle:
        made.step()
        found.append(beyond_live(made))
    check_nothing_is_held(made)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_hold_little_more_than_their_tokens(on_device: bool) -> None:
    assert max(in_large_blocks(on_device)) <= 0


def test_control_memory_that_is_taken_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = PagedCache.extend

    def ahead(cache: PagedCache, rows: Sequence[int], counts: Sequence[int]) -> Any:
        cache.reserve(rows, [cache.length(row) + count + 64 for row, count in zip(rows, counts, strict=True)])
        return extend(cache, rows, counts)

    monkeypatch.setattr(PagedCache, "extend", ahead)
    assert max(in_large_blocks(False)) > 0


def test_first_come_first_served() -> None:
    """A row that does not fit keeps those behind it waiting, or it would wait for ever."""
    made = engine(False, drafter="none", cache=paged(96))
    order = [40, 60, 10, 10]
    handles = [
        made.add(Request(prompt=tuple(range(1, 1 + n)), max_new_tokens=8, params=SAMPLED, seed=1, request_id=i))
        for i, n in enumerate(order)
    ]
    seen: list[int] = []
    while not made.is_idle:
        for progress in made.step():
            if progress.row not in seen:
                seen.append(progress.row)
    assert seen == handles


def test_no_more_rows_than_asked_for() -> None:
    made = engine(False, drafter="none")
    made.max_rows = 2
    for request in requests(5):
        made.add(request)
    most = 0
    while not made.is_idle:
        made.step()
        most = max(most, len(made.roster.running))
    assert most == 2
    assert {r.request.request_id: r.tokens for r in made.take_results()} == texts(
        engine(False, drafter="none"), requests(5)
    )


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("cache", [paged, RaggedCache], ids=["paged", "ragged"])
def test_a_row_that_cannot_fit_is_refused(cache: Any) -> None:
    made = engine(False, cache=cache(64))
    long = Request(prompt=(1,) * 40, max_new_tokens=25, params=SAMPLED)
    with pytest.raises(InvalidArgument, match=r"up to 25 new ones are 65 tokens.* of 64.*cache_tokens=65"):
        made.add(long)
    whole = Request(prompt=(1,) * 40, max_new_tokens=24, params=SAMPLED, seed=2)
    assert texts(made, [whole]) == texts(engine(False), [whole])


def test_a_deadline_passes_while_a_row_waits() -> None:
    """It ends with what it has, whether it was ever let in or not."""
    made, now = engine(False, drafter="none", cache=RaggedCache(72)), [0.0]
    made.clock = lambda: now[0]
    asked = [replace(r, deadline=5.0 if i > 3 else None) for i, r in enumerate(requests(8, new=40))]
    for request in asked:
        made.add(request)
    made.step()
    assert made.roster.waiting
    now[0] = 6.0
    made.step()
    ended = {result.request.request_id: result for result in made.take_results()}
    assert set(ended) == {4, 5, 6, 7}
    assert {result.finish_reason for result in ended.values()} == {FinishReason.TIME}
    assert any(not result.tokens for result in ended.values())
    finish(made)
    check_nothing_is_held(made)


class Counted:
    """How many tokens the target's passes have taken in."""

    def __init__(self, made: Engine) -> None:
        self.tokens, run = 0, made.target._run

        def counted(rows: Any, counts: Sequence[int], *rest: Any, **named: Any) -> Any:
            self.tokens += sum(counts)
            return run(rows, counts, *rest, **named)

        made.target._run = counted  # type: ignore[method-assign]


def behind(beginning: tuple[int, ...], number: int) -> list[Request]:
    return [
        Request(prompt=(*beginning, i + 1, i + 2), max_new_tokens=5, params=SAMPLED, seed=4, request_id=i)
        for i in range(number)
    ]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_shared_beginning_is_encoded_once(together: bool, drafter: str) -> None:
    """Of rows that come together, and of rows that come one after the other while some are running."""
    beginning = tuple(ragged_prompts(2, 97, 3, longest=100)[1])
    asked = behind(beginning, 6)
    want = texts(engine(False, drafter=drafter), asked)
    made = engine(False, drafter=drafter, cache=paged(2048))
    made.join_tokens = 0
    count, got = Counted(made), Texts()
    for request in asked:
        made.add(request)
        if not together:
            made.step()
    got = finish(made)
    assert got == want
    scored = sum(map(len, got.values())) * 5
    assert count.tokens < 2 * len(beginning) + scored
    alone = engine(False, drafter=drafter)
    alone.join_tokens = 0
    unshared = Counted(alone)
    for request in asked:  # one after the other: nothing is kept
        texts(alone, [request])
    assert unshared.tokens > 6 * len(beginning)
    check_nothing_is_held(made)


def test_turns_of_a_chat_begin_where_the_last_ended() -> None:
    made = engine(False, drafter="model", cache=paged(1024), keep_rows=1)
    made.join_tokens = 0
    first = Request(prompt=tuple(range(1, 50)), max_new_tokens=21, params=SAMPLED, seed=4)
    said = texts(made, [first])[0]
    count = Counted(made)
    second = Request(prompt=(*first.prompt, *said, 5, 6, 7), max_new_tokens=8, params=SAMPLED, seed=5)
    fresh = engine(False, drafter="model")
    assert texts(made, [second]) == texts(fresh, [second])
    assert count.tokens < 60, "of 73 tokens all but a few were there"
    check_blocks(made)


def test_without_keep_rows_nothing_outlives_a_call() -> None:
    """A model may change between calls, and nobody looks."""
    made = engine(False, drafter="model", cache=paged(1024))
    texts(made, [Request(prompt=tuple(range(1, 50)), max_new_tokens=9, params=SAMPLED, seed=4)])
    check_nothing_is_held(made)


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_paged", (True, False))
def test_features_are_not_kept_with_the_keys(is_paged: bool) -> None:
    """Nobody comes with the same tensors again. Equal texts are the same source: what was made of them is kept."""
    made, features = sequence_engine("whisper", is_paged), [row.clone() for row in rows_of("whisper")[:3]]
    left = list(map(weakref.ref, features))
    for row in features:
        texts(made, [Request(prompt=(2, 30, 31), max_new_tokens=4, source=Source(features=row))])
    del features, row
    gc.collect()
    assert not [ref for ref in left if ref() is not None]
    made = sequence_engine("bart", is_paged)
    asked = [Request(prompt=tuple(range(2, 32)), max_new_tokens=4, source=source_of(rows_of("bart")[0])) for _ in "ab"]
    texts(made, asked[:1])
    count = Counted(made)
    texts(made, asked[1:])
    assert count.tokens < 15, "of 30 tokens and 4"


def sequence_engine(family: str, is_paged: bool) -> Engine:
    target = Seq2SeqScorer(tiny_model(family), cache=paged(1024) if is_paged else None)
    return Engine(target, None, Constant(0), keep_rows=1)


@pytest.mark.slow
def test_a_waiting_row_does_not_ground_the_others() -> None:
    """Rounds are still sent off early while the first in the queue cannot be let in anyway."""
    made = engine(True, policy=3, cache=paged(72))
    for request in requests(8, new=40):
        made.add(request)
    assert made.runner is not None
    ahead = 0
    while not made.is_idle:
        made.step()
        ahead += bool(made.roster.waiting) and made.runner.has_pending
    assert ahead > 3


@pytest.mark.slow
def test_a_prompt_behind_a_round_that_holds_more_than_was_counted_is_read_later() -> None:
    """A row near its end is counted with what is left of it, its round is recorded for a longer draft: there one block
    is missing for a newcomer whose prompt has all that were free."""
    made = engine(True, drafter="exit", policy=16, cache=paged(160), ahead=False)
    old = Request(prompt=tuple(i % 90 + 1 for i in range(120)), max_new_tokens=40, params=SAMPLED, seed=1)
    made.add(old)
    made.prompt_tokens = 65
    while True:
        made.step()
        (row,) = made.roster.running.values()
        keys, held = len(row.history) - 1, len(made.target.cache._blocks[row.number])  # type: ignore[attr-defined]
        counted, taken = (-(-(keys + tokens) // SIZE) for tokens in (row.remaining, 17))
        if row.remaining < 17 and counted <= held < taken:
            break
    free = SIZE * made.target.cache.pool.num_available  # type: ignore[attr-defined]
    assert 65 < free <= 2 * 65, "two chunks, the second behind a round"
    prompt = tuple(7 * i % 89 + 1 for i in range(free))
    new = Request(prompt=prompt, max_new_tokens=1, params=SAMPLED, seed=1, request_id=1)
    made.add(new)
    got = finish(made)
    check_nothing_is_held(made)
    assert got == texts(engine(False, drafter="exit", policy=16), [old, new])


@pytest.mark.parametrize(("inner", "width", "depth"), [("model", 14, 3), ("exit", 14, 3), ("exit", 30, 30)])
@pytest.mark.slow
def test_the_largest_trees_fit_behind_a_row_that_has_all_the_room(inner: str, width: int, depth: int) -> None:
    """Or else it decodes plainly: a wide tree that is grown deep has asked about more guesses than it ends with."""
    model = tiny_model("llama")
    drafter = Tree(DraftModel(draft_of(model)) if inner == "model" else EarlyExit(1), nodes=MOST_NODES, width=width)
    made = Engine(Scorer(model, cache=paged(96), use=Kernels.OFF), drafter, Constant(depth))
    asked = Request(prompt=tuple(range(1, 57)), max_new_tokens=40)
    assert texts(made, [asked])[0] == tuple(plain_greedy(model, list(asked.prompt), 40))
    assert made.first_fault is None and made.num_preempted == 0


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.slow
def test_kept_rows_leave_where_they_are_in_the_way(on_device: bool) -> None:
    """Heads listen, so that finished rows are kept whole: also a row that is alone must find room beside them."""
    made = engine(on_device, drafter="feature", policy=2, cache=paged(64), keep_rows=4)
    for i in range(5):
        prompt = tuple((31 * i + 7 * place) % 89 + 1 for place in range(50))
        asked = Request(prompt=prompt, max_new_tokens=8, params=SAMPLED, seed=1)
        assert texts(made, [asked]) == texts(engine(False, drafter="feature", policy=2), [asked])
        check_blocks(made)


EVENTS = ("add", "add", "step", "step", "step", "step", "abort", "preempt", "wait")


def churn(seed: int, number: int, on_device: bool, cache: KeyValueCache, drafter: str) -> int:
    """Random events; every request ends exactly once, with what it would have said alone or a beginning of it.

    In float64: among tens of thousands of draws float32 carries one over the border between two tokens now and then.
    """
    plan, now = random.Random(seed), [0.0]
    made = engine(on_device, drafter=drafter, policy=3, cache=cache, double=True)
    made.clock = lambda: now[0]
    beginnings = [tuple(ragged_prompts(2, 97, seed + i, longest=30)[1]) for i in range(3)]
    asked: dict[int, Request] = {}
    ended: dict[int, tuple[tuple[int, ...], FinishReason]] = {}

    def collect() -> None:
        for result in made.take_results():
            assert result.request.request_id not in ended, "a request ends once"
            ended[result.request.request_id] = result.tokens, result.finish_reason

    for event in range(number):
        verb = plan.choice(EVENTS)
        if verb == "add" and len(made.roster.waiting) < 6:
            own = tuple(plan.randrange(1, 97) for _ in range(plan.randint(1, 12)))
            prompt = (*plan.choice((*beginnings, ()))[: plan.choice((0, 5, 30))], *own)
            deadline = now[0] + plan.randint(1, 12) if plan.random() < 0.15 else None
            request = Request(
                prompt=prompt, max_new_tokens=plan.randint(1, 44), params=plan.choice((SAMPLED, CUT)), seed=seed,
                request_id=event, deadline=deadline, stop_ids=frozenset({plan.randrange(97)}),
            )  # fmt: skip
            asked[event] = request
            made.add(request)
        elif verb == "abort" and plan.random() < 0.4:
            rows = [*made.roster.waiting, *made.roster.running.values()]
            if rows:
                made.abort(plan.choice(rows).handle)
        elif verb == "preempt" and len(made.roster.running) > 1 and not (made.runner and made.runner.has_pending):
            made.roster.preempt_newest()
        elif verb == "wait":
            now[0] += 1
        else:
            made.step()
        collect()
        check_blocks(made)
    while not made.is_idle:
        made.step()
    collect()
    assert ended.keys() == asked.keys()
    check_nothing_is_held(made)
    alone = engine(False, drafter=drafter, policy=3, double=True)
    for name, request in asked.items():
        said, reason = ended[name]
        alone.add(Request(**{**_fields(request), "deadline": None}))
        (want,) = _finished(alone)
        assert said == want[: len(said)], "each says a beginning of what it says alone"
        assert reason in (FinishReason.ABORT, FinishReason.TIME) or len(said) == len(want)
    return made.num_preempted


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def _finished(made: Engine) -> list[tuple[int, ...]]:
    return [result.tokens for result in finished(made)]


@pytest.mark.quick("True-none")
@pytest.mark.parametrize(("on_device", "drafter"), [(False, "model"), (True, "model"), (True, "none")])
def test_churn(on_device: bool, drafter: str) -> None:
    assert churn(1, 60, on_device, paged(88), drafter) > 0


@pytest.mark.slow
@pytest.mark.parametrize(  # every two of the three meet
    ("drafter", "cache", "on_device"),
    [
        ("model", "paged", True), ("model", "ragged", False), ("lookup", "paged", False),
        ("lookup", "ragged", True), ("none", "paged", True), ("none", "ragged", False),
    ],
)  # fmt: skip
def test_churn_for_long(drafter: str, cache: str, on_device: bool) -> None:
    made = paged(88) if cache == "paged" else RaggedCache(200)
    churn(0, 500, on_device, made, drafter)  # three thousand events in all cases together


def test_a_row_that_waits_no_longer_leaves_no_copy_of_its_prompt() -> None:
    row: Any = SimpleNamespace(
        handle=1, number=0, history=list(range(9)), remaining=4, request=SimpleNamespace(source=None)
    )
    full = Mock(spec=KeyValueCache, num_tokens=1, takes=lambda needs, new: False)
    admission = Admission()
    assert not admission.fits([full], [], row) and len(admission._prefix) == 8
    assert admission.fits([], [], row) and not admission._prefix
